"""Which decoding to recommend for photographs: the rule of `training.fusion`, applied to runs of `revisit eval`.

The runs have the benchmarks chair and pope on photos that no stage trained on. Besides what the benchmarks measure, captions that
name one object three times or more are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from revisit.errors import RevisitError
from revisit.eval.benchmarks import chair
from revisit.eval.benchmarks.base import Scores
from revisit.eval.log import read_logs
from training.fusion import METRICS, Outcome, pick


def repeats(caption: str) -> bool:
    """Whether a caption names one of CHAIR's objects three times or more, in whatever words."""
    return max(Counter(chair.parse_caption(caption).nodes).values(), default=0) >= 3


def outcomes(runs: Sequence[Path]) -> dict[str, Outcome]:
    """What each method gave, by its label, in the order of the runs."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    rates: dict[str, float] = {}
    for log in (log for run in runs for log in read_logs(run)):
        label, benchmark = log.spec.method, log.spec.benchmark_name
        if log.scores is None or benchmark in values.get(label, {}):
            raise RevisitError(
                f"{log.path} is unfinished or not the only one: each method needs one log of chair and one of pope."
            )
        values.setdefault(label, {})[benchmark] = log.scores.metrics
        if benchmark == "chair":
            captions = [answer.text for answer in log.current()]
            rates[label] = 100 * sum(map(repeats, captions)) / len(captions)
    for label, found in values.items():
        if not {"chair", "pope"} <= found.keys():
            raise RevisitError(f"{label!r} has no logs of both chair and pope.")
    return {
        label: Outcome(Scores(found["chair"], {}), Scores(found["pope"], {}), rates[label], None)
        for label, found in values.items()
    }


def report(runs: Sequence[Path]) -> str:
    """The table of some runs and the method that the rule chooses."""
    found = outcomes(runs)
    if "greedy" not in found:
        raise RevisitError("There are no greedy captions to compare with.")
    lines = [f"| decoding | {' | '.join(METRICS.values())} | repeats, % |", "|---" * (2 + len(METRICS)) + "|"]
    for label, made in found.items():
        values = " | ".join(f"{made.metric(name):.1f}" for name in METRICS)
        lines.append(f"| {label} | {values} | {made.repetition_rate:.1f} |")
    chosen = pick(found["greedy"], [(label, made) for label, made in found.items() if label != "greedy"])
    return "\n".join([*lines, "", f"Chosen: {chosen or 'none, because no method passes the rule'}."])
