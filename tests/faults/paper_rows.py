"""Every row of `revisit reproduce` with the embedded model from an empty folder, killed in the middle and resumed; prints a table.

    PYTHONPATH=src:tests python tests/faults/paper_rows.py                 every row, against one run of all that nobody kills
    PYTHONPATH=src:tests python tests/faults/paper_rows.py chair pope      some rows

A row passes if its answers and studies are those of the whole run, no cell of its tables is "not run", and its figures are there. Times are
processor time, so a busy machine does not change them. Needs NLTK's data; ten minutes on one core. `tests/report/test_reproduce.py` does
the same for one row in the test suite.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from revisit.report.paper import ROWS


def start(rows: str, out: Path) -> subprocess.Popen[bytes]:
    """The command in a process group of its own."""
    command = [sys.executable, "-m", "revisit", "reproduce", rows, "--model", "tiny", "--out", str(out), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def finish(process: subprocess.Popen[bytes], what: str) -> None:
    errors = process.communicate()[1].decode()
    if process.returncode:
        raise SystemExit(f"{what} ended with status {process.returncode}: {errors}")


def answers(out: Path) -> dict[tuple[str, str, str], str]:
    """(runs, ablation or analyses; folder of the cell; item) -> answer, of everything that the runner stored."""
    found = {}
    for path in out.glob("*/**/cells/*/answers.jsonl"):
        place = path.relative_to(out).parts[0]
        for line in path.read_text("utf-8").splitlines():
            try:
                answer = json.loads(line)
            except ValueError:  # being written
                continue
            found[place, path.parent.name, answer["id"]] = answer["text"]
    return found


def studies(out: Path) -> dict[str, Any]:
    """Name -> what was measured."""
    paths = out.glob("analyses/studies/*.json")
    return {path.name.split("-tiny-")[0]: json.loads(path.read_text("utf-8"))["result"] for path in paths}


def kill_in_the_middle(row: str, out: Path, expected: int) -> int:
    """Kills the row's process group after half of its answers, or, if it stores none, while it works; how many there were."""
    process = start(row, out)
    began = time.monotonic()
    while process.poll() is None:
        if expected and len(answers(out)) >= max(1, expected // 2):
            break
        if not expected and (out / "scenes").is_dir() and time.monotonic() - began > 3:
            break
        time.sleep(0.05)
    stored = len(answers(out))
    if process.poll() is not None:
        raise SystemExit(f"{row} ended before it could be killed: {process.communicate()[1].decode()}")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return stored


def check(row: str, out: Path, whole: Path) -> dict[str, Any]:
    """What the resumed row gave, compared with the whole run."""
    ours, theirs = answers(out), answers(whole)
    different = [key for key, text in ours.items() if theirs.get(key) != text]
    measured = studies(whole)
    different += [name for name, result in studies(out).items() if result != measured[name]]
    report = (out / "report.md").read_text("utf-8")
    return {
        "answers": len(ours),
        "studies": len(studies(out)),
        "different": len(different),
        "not run": report.count("| not run |"),
        "published": "published" in report.lower(),
        "figures": len(list(out.glob("figures/*.svg"))),
    }


def processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    rows = sys.argv[1:] or list(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(start(",".join(rows), whole), "the whole run")
        known = answers(whole)
        told = {"row": f"{len(rows)} rows, not killed", "answers": len(known), "seconds": round(processor_time())}
        sys.stdout.write(json.dumps(told) + "\n")
        for row in rows:
            before, out = processor_time(), Path(folder) / row
            expected = sum(_belongs(row, place, cell) for place, cell, _ in known)
            stored = kill_in_the_middle(row, out, expected)
            finish(start(row, out), row)
            about = {"row": row, "killed after": stored, **check(row, out, whole)}
            sys.stdout.write(json.dumps({**about, "seconds": round(processor_time() - before)}) + "\n")
            sys.stdout.flush()


def _belongs(row: str, place: str, cell: str) -> bool:
    """Whether an answer of the whole run is one of this row's."""
    about = ROWS[row]
    if row in ("projection", "vision-words", "token-tables"):
        return False  # they store no answers
    if place != {"ablation": row, "study": "analyses"}.get(about.kind, "runs"):
        return False
    named = [method.split(":")[0] for method in about.methods]
    return f"-{about.benchmark}-" in cell and any(f"tiny-{name}" in cell for name in named)


if __name__ == "__main__":
    main()
