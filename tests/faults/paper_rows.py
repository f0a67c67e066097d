"""Every row of `revisit reproduce` with the embedded model from an empty folder, killed at a random moment and resumed; prints a table.

    PYTHONPATH=src:tests python tests/faults/paper_rows.py                 every row, against one run of all that nobody kills
    PYTHONPATH=src:tests python tests/faults/paper_rows.py chair pope      some rows

A row passes if its answers, studies and section of the report (but for times and the command) are those of the whole run, and no cell of
its tables is "not run". Times are processor time, so a busy machine does not change them, nor the moments of the kills. Needs Linux and
NLTK's data; 20 minutes on one core. `tests/paper/test_reproduce.py` does the same for one row in the test suite.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paper_data import stand_in_data
from revisit.explain.files import read_lines
from revisit.paper.published import ROWS


def start(rows: str, out: Path) -> subprocess.Popen[bytes]:
    """The command in a process group of its own."""
    scenes = str(stand_in_data(out.parent))  # which fill every cell
    command = [
        sys.executable,
        "-m",
        "revisit",
        "reproduce",
        rows,
        "--model",
        "tiny",
        "--data",
        scenes,
        "--out",
        str(out),
        "--quiet",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def finish(process: subprocess.Popen[bytes], what: str) -> None:
    errors = process.communicate()[1].decode()
    if process.returncode:
        raise SystemExit(f"{what} ended with status {process.returncode}: {errors}")


def answers(out: Path) -> dict[tuple[str, str, str], str]:
    """Return (runs, ablation or analyses; log; item) -> answer, of everything that was stored."""
    found = {}
    for path in out.glob("*/**/logs/*.jsonl"):
        place = path.relative_to(out).parts[0]
        for row in read_lines(path)[0]:
            if "text" in row:
                found[place, path.name, row["id"]] = row["text"]
    return found


def studies(out: Path) -> dict[str, Any]:
    """Name -> what was measured."""
    paths = out.glob("analyses/studies/*.json")
    return {path.name.split("-tiny-")[0]: json.loads(path.read_text("utf-8"))["result"] for path in paths}


def kill_in_the_middle(row: str, out: Path, draw: random.Random) -> tuple[float, int]:
    """Kills the row's process group at a random moment after its work began; processor time since then, and answers stored.

    A row that ends first tells how long it takes, and is begun again.
    """
    longest = 25.0  # seconds of work, until it is known
    while True:
        shutil.rmtree(out, ignore_errors=True)
        process, began, until, used = start(row, out), None, 0.0, 0.0
        while process.poll() is None and (began is None or used < until):
            with contextlib.suppress(FileNotFoundError):
                used = running_time(process.pid)
            if began is None and _works(row, out):
                began = used
                until = began + draw.uniform(0.2, longest)
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if not (out / "report.md").exists():
                return used - (began or 0.0), len(answers(out))
        else:
            finish(process, row)
        longest = max(0.5, 0.8 * (used - (began or 0.0)))


def _works(row: str, out: Path) -> bool:
    """Whether models are loaded and asked: before that there is nothing to resume."""
    stores = row not in ("projection", "token-tables")
    return any((out / place).is_dir() for place in ("runs", "ablation", "ablation-vqav2", "analyses")) or (
        not stores and out.is_dir()
    )


def section(out: Path, row: str) -> list[str]:
    """The row's lines of the report, without the commands and, where they are measured, times."""
    title = f"## {ROWS[row].title} ({ROWS[row].where})"
    _, _, rest = (out / "report.md").read_text("utf-8").partition(f"{title}\n")
    lines = rest.partition("\n## ")[0].replace(str(out), "OUT").splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith(("Made by", "![ours"))]
    return [line for line in kept if row != "latency" or not line.startswith("|")]


def check(row: str, out: Path, whole: Path) -> dict[str, Any]:
    """What the resumed row gave, compared with the whole run."""
    ours, theirs = answers(out), answers(whole)
    different = [key for key, text in ours.items() if theirs.get(key) != text]
    measured = studies(whole)
    different += [name for name, result in studies(out).items() if result != measured[name]]
    told, expected = section(out, row), section(whole, row)
    different += [ours_ for ours_, theirs_ in zip_longest(told, expected) if ours_ != theirs_]
    return {
        "answers": len(ours),
        "studies": len(studies(out)),
        "lines of the report": len(told),
        "different": len(different),
        "not run": sum("not run" in line for line in told),
        "figures": len(list(out.glob("figures/*.svg"))),
    }


def running_time(process: int) -> float:
    """Seconds of processor time that a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor_time() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    rows = sys.argv[1:] or list(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(start(",".join(rows), whole), "the whole run")
        told = {
            "row": f"{len(rows)} rows, not killed",
            "answers": len(answers(whole)),
            "seconds": round(processor_time()),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        for row in rows:
            before, out = processor_time(), Path(folder) / row
            after, stored = kill_in_the_middle(row, out, random.Random(row))
            finish(start(row, out), row)
            about = {"row": row, "killed after": round(after, 1), "stored": stored, **check(row, out, whole)}
            sys.stdout.write(json.dumps({**about, "seconds": round(processor_time() - before)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
