"""The checks of `revisit doctor --gpu` and `--engine`, and their report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from revisit import __version__
from revisit.io.files import write_json

Status = Literal["PASS", "FAIL", "SLOW", "NOTE", "needs a GPU"]
VERDICTS = ("Everything is right.", "Something is wrong: see FAIL above.", "Right as far as it could be checked.")


class Check(NamedTuple):
    """The outcome of one check."""

    name: str
    status: Status
    value: str = ""
    threshold: str = ""


def status(results: Sequence[Check]) -> int:
    """Return the exit status of a report: 0 if nothing is wrong, 1 if something is, 2 if it is slow or needs a GPU."""
    found = {check.status for check in results}
    return 1 if "FAIL" in found else 2 if found & {"SLOW", "needs a GPU"} else 0


def report(checks: Iterable[Check], out: Path | None) -> int:
    """Print every check as it ends, then the verdict; return the exit status."""
    results = []
    for check in checks:
        results.append(check)
        threshold = f"  (limit: {check.threshold})" if check.threshold else ""
        print(f"{check.status:11}  {check.name}: {check.value}{threshold}".removesuffix(": "), flush=True)
    counts = Counter(check.status for check in results)
    print(f"\n{VERDICTS[status(results)]} {', '.join(f'{count} {name}' for name, count in counts.items())}.")
    if out is not None:
        found = [check._asdict() for check in results]
        write_json(out, {"revisit": __version__, "status": status(results), "checks": found})
    return status(results)
