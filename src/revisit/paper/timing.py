"""Time per token over many pictures, as the paper measures it: warm-up, several repeats of each picture, prefill apart.

Methods take turns on every picture, so that a slow minute of the machine is everybody's. What was measured is on the disk
picture by picture: a killed measurement goes on with the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from revisit.evaluation.records import checksum, compact
from revisit.evaluation.runner import Reporter, Silent
from revisit.evaluation.store import digest, disk_error, make_folder
from revisit.paper.study import Subject, track


@dataclass(frozen=True)
class Protocol:
    """How often what is run."""

    images: int = 300
    warmups: int = 6
    repeats: int = 3
    max_new_tokens: int = 512


def time_methods(
    subject: Subject, methods: Mapping[str, Any], protocol: Protocol, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Milliseconds per token and to the first token of every method: mean and deviation over the pictures."""
    reporter = reporter or Silent()
    items = subject.items[: protocol.images]
    about = {"protocol": asdict(protocol), "methods": {name: [m.name, m.settings()] for name, m in methods.items()}}
    path = make_folder(Path(subject.output) / "latency") / f"{digest([about, subject.settings()])[:12]}.jsonl"
    done = _stored(path)
    todo = [item for item in items if item.id not in done]
    if todo:
        _warm_up(subject, todo[0], methods, protocol)
    for item in track(reporter, f"latency of {len(methods)} methods", todo):
        row = {"image": item.id, "times": _measure(subject, item, methods, protocol)}
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(compact({**row, "check": checksum(row)}) + "\n")
        except OSError as error:
            raise disk_error(error, path) from error
        done[item.id] = row["times"]
    return {**about, "images": len(items), "rows": _summary([done[item.id] for item in items], list(methods))}


def _stored(path: Path) -> dict[str, Any]:
    """What was measured before; a line that is not whole is measured again."""
    found = {}
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            check = row.pop("check")
        except (ValueError, AttributeError, KeyError):
            continue
        if check == checksum(row):
            found[row["image"]] = row["times"]
    return found


def _inputs(subject: Subject, item: Any) -> Any:
    from revisit.models.images import open_image
    from revisit.models.prompts import prepare

    model, processor = subject.loaded
    return dict(prepare(processor, [item.prompt], [[open_image(path) for path in item.images]], model.device))


def _warm_up(subject: Subject, item: Any, methods: Mapping[str, Any], protocol: Protocol) -> None:
    from revisit.paper.latency import Timing, time_call

    inputs = _inputs(subject, item)
    for _ in range(protocol.warmups):
        for name, method in methods.items():
            time_call(subject.loaded[0], inputs, method, Timing(name), None, do_sample=False, max_new_tokens=8)


def _measure(subject: Subject, item: Any, methods: Mapping[str, Any], protocol: Protocol) -> dict[str, Any]:
    """Method -> milliseconds to the first token and per further token, one of each per repeat."""
    from revisit.paper.latency import Timing, time_call

    inputs = _inputs(subject, item)
    timings = {name: Timing(name) for name in methods}
    for _ in range(protocol.repeats):
        for name, method in methods.items():
            options = {"do_sample": False, "max_new_tokens": protocol.max_new_tokens}
            time_call(subject.loaded[0], inputs, method, timings[name], None, **options)
    return {
        name: {
            "first": [round(1000 * seconds, 4) for seconds in timing.first],
            "per_token": [round(1000 * fmean(run), 4) for run in timing.intervals if run],
        }
        for name, timing in timings.items()
    }


def _summary(rows: list[dict[str, Any]], methods: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in methods:
        per_token = [fmean(row[name]["per_token"]) for row in rows if row[name]["per_token"]]
        first = [fmean(row[name]["first"]) for row in rows]
        found.append(
            {
                "method": name,
                "ms": fmean(per_token) if per_token else None,
                "sd": stdev(per_token) if len(per_token) > 1 else 0.0,
                "first": fmean(first),
                "first_sd": stdev(first) if len(first) > 1 else 0.0,
                "images": len(per_token),
            }
        )
    return found
