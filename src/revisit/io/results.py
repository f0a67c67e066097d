"""The results of a command on many items: a folder in which a killed or repeated command continues.

`settings.json` has what all results have in common, a file of lines one result for each item, and `failures.jsonl` the items without a
result. The lines are in the order of the items when a command ends, whatever was stored when it began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.io.files import LineFile, inside, make_folder, scan_lines, write_bytes, write_json, write_text
from revisit.io.records import read_json

SETTINGS, FAILURES = "settings.json", "failures.jsonl"
Line = Mapping[str, Any]


class Results:
    """The lines of a results folder, which only this process can append to.

    Args:
        path: The file of lines; its folder is created if needed.
        settings: What identifies the results, besides the items.
        key: Returns the identity of a line's item.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], key: Callable[[Line], Hashable]) -> None:
        self.path, self.key = path, key
        self._file = LineFile(inside(make_folder(path.parent), path.name), lambda line: (key(line), line.get("hash")))
        self.hashes: dict[Hashable, str] = dict(self._file.objects)
        self._in_order = False
        try:
            self._check_settings(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = inside(self.path.parent, SETTINGS)
        stored = read_json(path) if path.exists() else {}
        if not self.hashes:
            write_json(path, settings)
        elif changed := [name for name in {**settings, **stored} if stored.get(name) != settings.get(name)]:
            raise RevisitError(
                f"{self.path.parent} has results with other settings ({', '.join(changed)}); use another --out."
            )

    def has(self, key: Hashable, hashes: Callable[[], str | None]) -> bool:
        """Return whether the item has a result, and its images still have the hash that was stored with it."""
        return key in self.hashes and self.hashes[key] == hashes()

    def append(self, lines: Sequence[Line]) -> None:
        """Store the results of a batch: all of them or none."""
        if lines:
            self._file.append(lines)
            self.hashes.update((self.key(line), line["hash"]) for line in lines)

    def finish(self, keys: Iterable[Hashable], failures: Sequence[Line]) -> None:
        """Put the lines in the order of these items, those of other items last, and list the failures."""
        failed = inside(self.path.parent, FAILURES)
        if failures:
            write_text(failed, "".join(json.dumps(line) + "\n" for line in failures))
        else:
            failed.unlink(missing_ok=True)
        places = {}  # item -> offset and length of its last line
        order, offset = [], 0
        for raw, line in scan_lines(self.path):
            if line is not None:
                order.append(self.key(line))
                places[order[-1]] = offset, len(raw)
            offset += len(raw)
        wanted = list(dict.fromkeys([*(key for key in keys if key in places), *places]))
        if wanted != order:
            with self.path.open("rb") as file:
                write_bytes(self.path, b"".join(_read(file, *places[key]) for key in wanted))

    def close(self) -> None:
        """Close the file, so that other processes can open it."""
        self._file.close()


def _read(file: Any, offset: int, length: int) -> bytes:
    file.seek(offset)
    return bytes(file.read(length))
