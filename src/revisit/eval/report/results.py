"""`results.json`: all numbers of an output folder, for other programs. This package does not read it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revisit.eval.log import SCORES, Log
from revisit.explain.files import write_json

FILE = "results.json"


def write_results(folder: Path, logs: Sequence[Log]) -> Path:
    """Write the results of all logs of a folder; return the file."""
    path = folder / FILE
    write_json(path, {"logs": [entry(log) for log in logs]})
    return path


def entry(log: Log) -> dict[str, Any]:
    """Return one log as plain data: its spec, its request, and its numbers on the scale of the printed tables."""
    fields: dict[str, Any] = {
        "log": log.path.name,
        "complete": log.scores is not None,
        **log.spec.model_dump(mode="json"),
        "answers": log.answered,
        "request": log.request.model_dump(mode="json"),
        "totals": log.totals(),
    }
    if log.scores is None:
        return fields
    plain = json.loads(SCORES.dump_json(log.scores, exclude={"per_item", "items", "shown", "intervals"}))
    for name, metric in log.scores.shown.items():
        value, low, high = (None if math.isnan(x) else x for x in log.scores.value(name))
        kind = getattr(log.scores.intervals[name], "kind", None)
        plain["metrics"][name] = {"value": value, "low": low, "high": high, "interval": kind, "better": metric.better}
    return {**fields, **plain, "n": len(log.scores.items)}
