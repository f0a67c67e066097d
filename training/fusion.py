"""Does a weight that follows the agreement of image and text beat the paper's fixed weight?

The protocol is in docs/research/note.md. `choose` tries the candidates on validation scenes and applies a rule that was
fixed in advance; `test` measures the choice on fresh scenes and compares it with the paper's fixed weight, a fixed weight of
the same mean, other alphas and layers, and sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from revisit.decoding.generate import generate
from revisit.decoding.method import Method
from revisit.decoding.trace import Trace
from revisit.embedded.scenes import Scene, render, scene
from revisit.errors import RevisitError
from revisit.eval.benchmarks import chair
from revisit.eval.benchmarks.base import Scores
from revisit.eval.benchmarks.language import require_data
from revisit.eval.statistics import holm, paired
from revisit.io.files import make_folder, write_json
from revisit.io.records import read_json
from revisit.methods.revisit import ReVisiT
from revisit.models.loading import load
from revisit.models.outputs import generated_text
from revisit.models.prompts import prepare
from training.card import Plan as Scenes
from training.card import presence, repetition_rate, truth

log = logging.getLogger(__name__)

METRICS = {"CHAIRs": "CHAIR_S ↓", "CHAIRi": "CHAIR_I ↓", "Recall": "recall ↑", "F1": "F1 ↑", "presence": "presence ↑"}
PRESENCE_LOSS = 0.5  # points of presence accuracy that the choice may lose against greedy
MAX_REPETITION = 1.0  # percent of captions that may name one object three times or more, unless greedy's rate is higher
SIMPLER = 0.2  # points of F1 by which a simpler candidate may trail the best and still be chosen

# In the order of simplicity: of two candidates within SIMPLER points of F1 the earlier one is chosen.
CANDIDATES: dict[str, ReVisiT] = {
    "fixed 1": ReVisiT(),
    "agreement": ReVisiT(weight="agreement"),
    "uncertainty": ReVisiT(weight="uncertainty"),
    "both": ReVisiT(weight="both"),
    "agreement, 4 nearest": ReVisiT(weight="agreement", neighbors=4),
    "agreement, 8 nearest": ReVisiT(weight="agreement", neighbors=8),
    "agreement, 16 nearest": ReVisiT(weight="agreement", neighbors=16),
    "both, 8 nearest": ReVisiT(weight="both", neighbors=8),
    "agreement, soft": ReVisiT(weight="agreement", select="soft"),
}
ALPHAS = (1e-2, 1e-3, 1e-4, 1e-6)
FEWER = 300  # of the test scenes, for variants of the choice and for sampling


@dataclass(frozen=True)
class Plan:
    """The number of scenes and their seeds; validation and test share no scene."""

    model: str = "tiny"
    validation: int = 400  # unusual scenes of `seed`
    test: int = 1000  # unusual scenes of `seed + 1`
    usual: int = 500  # usual scenes of `seed + 2`, in the test
    seed: int = 301
    batch: int = 32
    workers: int = 1
    new_tokens: int = 96

    def scenes(self, part: str) -> list[Scene]:
        """Return the scenes of "validation", "test" or "usual"."""
        number = {"validation": 0, "test": 1, "usual": 2}[part]
        kind = "usual" if part == "usual" else "unusual"
        return [scene(kind, self.seed + number, index) for index in range(getattr(self, part))]


@dataclass(frozen=True)
class Job:
    """A method to run on some scenes."""

    model: str
    scenes: list[Scene]
    method: Method | None
    batch: int
    new_tokens: int
    sampling_seed: int | None = None  # greedy without one


@dataclass(frozen=True)
class Outcome:
    """The scores of a method: CHAIR and presence, repetition, and the mean weight of its steps."""

    chair: Scores
    presence: Scores
    repetition_rate: float  # percent
    weight: float | None  # mean weight of the vision side

    def metric(self, name: str) -> float:
        """Return a metric in percent."""
        return 100 * (self.presence.metrics["accuracy"] if name == "presence" else self.chair.metrics[name])

    def per_item(self, name: str) -> Any:
        """Return the terms that paired statistics compare."""
        return self.presence.per_item["accuracy"] if name == "presence" else self.chair.per_item[name]


def run(job: Job) -> Outcome:
    """Run a method on captions and presence questions."""
    torch.set_num_threads(1)
    model, processor = load(job.model)
    captions: list[str] = []
    for start in range(0, len(job.scenes), job.batch):
        if job.sampling_seed is not None:
            torch.manual_seed(job.sampling_seed * 1_000_003 + start)
        captions += caption(model, processor, job, job.scenes[start : start + job.batch], Trace())
    captioned = chair.score_captions((s.key, text, truth(s)) for s, text in zip(job.scenes, captions, strict=True))
    answered = presence(model, processor, job.scenes, job.method, Scenes(batch=job.batch))
    return Outcome(captioned, answered, 100 * repetition_rate(captions), mean_weight(model, processor, job))


def mean_weight(model: Any, processor: Any, job: Job) -> float | None:
    """Return the mean weight over the steps of the first 16 captions; None for methods without weights."""
    if not isinstance(job.method, ReVisiT):
        return None
    if isinstance(job.method.weight, float):
        return job.method.weight
    recorded = Trace(record=True)
    caption(model, processor, job, job.scenes[:16], recorded)
    weights = [step.weight for row in recorded.rows for step in row.records if step.weight is not None]
    return sum(weights) / len(weights) if weights else None


def caption(model: Any, processor: Any, job: Job, scenes: Sequence[Scene], trace: Trace) -> list[str]:
    """Return captions of some scenes, in one batch."""
    inputs = prepare(processor, [chair.PROMPT] * len(scenes), [[render(drawn)] for drawn in scenes])
    sampling = (
        {"do_sample": False} if job.sampling_seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    )
    with torch.inference_mode():
        made = generate(
            model, **inputs, method=job.method or "greedy", trace=trace, max_new_tokens=job.new_tokens, **sampling
        )
    return generated_text(processor, made, inputs)


def run_all(plan: Plan, scenes: Sequence[Scene], methods: Sequence[Method | None], **options: Any) -> Iterator[Outcome]:
    """Call `run` for several methods, `plan.workers` at a time; yield the results in order."""
    jobs = [Job(plan.model, list(scenes), method, plan.batch, plan.new_tokens, **options) for method in methods]
    if plan.workers == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(plan.workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, jobs)


def row(name: str, made: Outcome, base: Outcome | None = None) -> dict[str, Any]:
    """Return one row of a table: every metric, and its paired difference to greedy."""
    out: dict[str, Any] = {"decoding": name, "repetition_rate": made.repetition_rate, "weight": made.weight}
    for metric in METRICS:
        out[metric] = made.metric(metric)
        if base is not None:
            apart = paired(base.per_item(metric), made.per_item(metric))
            out[f"{metric} difference"] = [100 * value for value in (apart.difference, apart.low, apart.high)]
            out[f"{metric} p"] = apart.p_permutation
    return out


def pick(greedy: Outcome, tried: Sequence[tuple[str, Outcome]]) -> str | None:
    """Choose the simplest candidate whose F1 is within 0.2 points of the best; None if no candidate is admitted.

    A candidate is admitted if it repeats itself in at most 1 % of the captions (or no more often than greedy decoding), its
    recall is not below greedy's, and its presence accuracy is at most half a point below greedy's.
    """
    allowed = [
        (name, made)
        for name, made in tried
        if made.repetition_rate <= max(MAX_REPETITION, greedy.repetition_rate)
        and made.metric("Recall") >= greedy.metric("Recall")
        and made.metric("presence") >= greedy.metric("presence") - PRESENCE_LOSS
    ]
    if not allowed:
        return None
    best = max(made.metric("F1") for _, made in allowed)
    return next(name for name, made in allowed if made.metric("F1") >= best - SIMPLER)


def choose(plan: Plan, out: Path) -> dict[str, Any]:
    """Try every candidate on the validation scenes and write choice.json."""
    require_data()
    make_folder(out)
    greedy, *made = run_all(plan, plan.scenes("validation"), [None, *CANDIDATES.values()])
    tried = list(zip(CANDIDATES, made, strict=True))
    name = pick(greedy, tried)
    result = {
        "plan": asdict(plan),
        "rows": [row("greedy", greedy), *(row(label, outcome, greedy) for label, outcome in tried)],
        "chosen": name,
        "weight": None if name is None else dict(tried)[name].weight,
        "weights": {label: outcome.weight for label, outcome in tried},
    }
    write_json(out / "choice.json", result)
    return result


def test(plan: Plan, out: Path) -> dict[str, Any]:
    """Measure the stored choice on scenes that were not used to choose it; write test.json."""
    choice = read_json(out / "choice.json")
    if choice["chosen"] is None:
        raise RevisitError(f"No candidate passed the rule in {out / 'choice.json'}, so there is none to test.")
    chosen = CANDIDATES[choice["chosen"]]
    same_mean = chosen.replace(weight=round(float(choice["weight"]), 3))
    main: dict[str, Method | None] = {
        "greedy": None,
        choice["chosen"]: chosen,
        f"fixed {same_mean.weight:g} (same mean weight)": same_mean,
        "fixed 1": CANDIDATES["fixed 1"],
    }
    variants: dict[str, Method | None] = {
        "greedy": None,
        choice["chosen"]: chosen,
        "agreement": CANDIDATES["agreement"],
        **{f"{choice['chosen']}, alpha {alpha:g}": chosen.replace(alpha=alpha) for alpha in ALPHAS},
        f"{choice['chosen']}, all layers": chosen.replace(layers="all"),
    }
    few = {name: main[name] for name in ("greedy", choice["chosen"], "fixed 1")}
    fewer = replace(plan, test=min(plan.test, FEWER))
    result: dict[str, Any] = {"plan": asdict(plan), "chosen": choice["chosen"]}
    result["unusual"] = _rows(plan, "test", main)
    result["usual"] = _rows(plan, "usual", few)
    result["variants"] = _rows(fewer, "test", variants)
    result["sampling"] = {str(seed): _rows(fewer, "test", few, sampling_seed=seed) for seed in (0, 1, 2)}
    write_json(out / "test.json", result)
    return result


def _rows(plan: Plan, part: str, methods: dict[str, Method | None], **options: Any) -> list[dict[str, Any]]:
    """Return the rows of some methods on one part of the scenes; p-values are corrected by Holm over all comparisons."""
    greedy, *made = run_all(plan, plan.scenes(part), list(methods.values()), **options)
    rows = [row(name, outcome, greedy) for name, outcome in zip(list(methods)[1:], made, strict=True)]
    for metric in METRICS:
        corrected = holm([entry[f"{metric} p"] for entry in rows])
        for entry, p in zip(rows, corrected, strict=True):
            entry[f"{metric} p (Holm)"] = p
    return [row("greedy", greedy), *rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write rows as a markdown table: value (difference to greedy [95 % interval])."""
    lines = [
        f"| decoding | {' | '.join(METRICS.values())} | stuck, % | mean weight |",
        "|---" * (3 + len(METRICS)) + "|",
    ]
    for entry in rows:
        cells = []
        for metric in METRICS:
            apart = entry.get(f"{metric} difference")
            extra = "" if apart is None else f" ({apart[0]:+.1f} [{apart[1]:+.1f}, {apart[2]:+.1f}])"
            cells.append(f"{entry[metric]:.1f}{extra}")
        weight = "" if entry["weight"] is None else f"{entry['weight']:.2f}"
        lines.append(f"| {entry['decoding']} | {' | '.join(cells)} | {entry['repetition_rate']:.1f} | {weight} |")
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    """Write the tables of `choose` or `test`."""
    if "rows" in result:
        return (
            f"{table(result['rows'])}\n\nChosen: {result['chosen'] or 'none, because no candidate passes the rule'}.\n"
        )
    parts = [f"Unusual scenes:\n\n{table(result['unusual'])}", f"Usual scenes:\n\n{table(result['usual'])}"]
    parts.append(
        f"Variants, the first {min(result['plan']['test'], FEWER)} unusual scenes:\n\n{table(result['variants'])}"
    )
    parts += [f"Unusual scenes, sampling, seed {s}:\n\n{table(rows)}" for s, rows in result["sampling"].items()]
    return "\n\n".join(parts) + "\n"


def report(part: str, plan: Plan, out: Path) -> str:
    """Run a part of the study, "choose" or "test", and write its tables next to its numbers."""
    if part == "test" and not (out / "choice.json").is_file():
        raise RevisitError(
            f"There is no choice in {out}: run `python -m training fusion choose --out {quote(str(out))}` first."
        )
    text = markdown(choose(plan, out) if part == "choose" else test(plan, out))
    (out / f"{part}.md").write_text(text, "utf-8")
    log.info("wrote %s", out / f"{part}.json")
    return text
