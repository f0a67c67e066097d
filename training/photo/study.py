"""Choose the decoding method to recommend for photographs, by a rule applied to runs of `revisit eval`.

The runs have the benchmarks chair and pope on photos that no stage trained on, with greedy decoding, the paper's setting and the
candidates, which set `once`, the simplest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from revisit.errors import RevisitError
from revisit.eval.log import read_logs

GREEDY, PAPER, CANDIDATE = "greedy", "revisit", "once="  # labels of two methods, and a part of every candidate's label
METRICS = {
    "CHAIRs": "CHAIR_S",
    "CHAIRi": "CHAIR_I",
    "Recall": "recall",
    "F1": "F1",
    "DistinctP": "distinct precision",
    "DistinctF1": "distinct F1",
    "Rep": "repeats, %",
    "accuracy": "questions",
}
MORE_REPEATS, FEWER_RIGHT, SIMPLER = 1.0, 0.5, 0.2  # points

Outcome = dict[str, float]  # metric -> percent


def outcomes(runs: Sequence[Path]) -> dict[str, Outcome]:
    """Return the metrics of each method by its label, in the order of the runs."""
    out: dict[str, Outcome] = {}
    for log in (log for run in runs for log in read_logs(run)):
        found = out.setdefault(str(log.spec.method), {})
        names = ("accuracy",) if log.spec.benchmark_name == "pope" else tuple(METRICS)[:-1]
        if log.scores is None or names[0] in found:
            raise RevisitError(
                f"{log.path} is unfinished or not the only one: each method needs one log of chair and one of pope."
            )
        found |= {name: 100 * log.scores.metrics[name] for name in names}
    for label, found in out.items():
        if found.keys() != METRICS.keys():
            raise RevisitError(f"{label!r} has no logs of both chair and pope.")
    for label in (GREEDY, PAPER):
        if label not in out:
            raise RevisitError(f"There is no run of {label!r} to compare with.")
    return out


def pick(found: Mapping[str, Outcome]) -> str | None:
    """Return the candidate with the best distinct F1, or the first one within 0.2 points of it; None if no candidate passes.

    A candidate passes with a distinct F1 above greedy's and above that of the paper's setting, a distinct precision not below
    greedy's, at most one point more of repeating captions, and at most half a point fewer right answers.
    """
    greedy, bar = found[GREEDY], max(found[label]["DistinctF1"] for label in (GREEDY, PAPER))
    passing = {
        label: made["DistinctF1"]
        for label, made in found.items()
        if CANDIDATE in label
        and made["DistinctF1"] > bar
        and made["DistinctP"] >= greedy["DistinctP"]
        and made["Rep"] <= greedy["Rep"] + MORE_REPEATS
        and made["accuracy"] >= greedy["accuracy"] - FEWER_RIGHT
    }
    return next((label for label, f1 in passing.items() if f1 >= max(passing.values()) - SIMPLER), None)


def report(runs: Sequence[Path]) -> str:
    """Return the table of some runs and the method that the rule chooses."""
    found = outcomes(runs)
    lines = [f"| decoding | {' | '.join(METRICS.values())} |", "|---" * (1 + len(METRICS)) + "|"]
    lines += [f"| {label} | {' | '.join(f'{made[name]:.1f}' for name in METRICS)} |" for label, made in found.items()]
    return "\n".join([*lines, "", f"Chosen: {pick(found) or 'none, because no method passes the rule'}."])
