"""Measure an embedded model for its card: captions, presence questions, the lens, and ReVisiT.

ReVisiT's settings are chosen on unusual scenes of one seed (validation) and reported on those of another (test), with
paired intervals over the same scenes. All captions answer CHAIR's prompt, greedily.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from revisit.decoding.decode import decode_prompts
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.embedded import text
from revisit.embedded.catalog import BY_NOUN, CATEGORIES
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import Scene, render, scene
from revisit.eval.benchmarks import chair, yes_no
from revisit.eval.benchmarks.base import Scores
from revisit.eval.statistics import paired, wilson
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.models.loading import load
from revisit.models.prompts import prepare
from revisit.words import WORDS

log = logging.getLogger(__name__)

MAX_REPETITION = 0.01  # share of captions that may repeat one object


@dataclass(frozen=True)
class Plan:
    """The number of scenes of each kind, their seeds, and the settings to try."""

    usual: int = 500
    validation: int = 400
    test: int = 1000
    batch: int = 32
    workers: int = 1  # processes that decode side by side, one thread each if more than one
    new_tokens: int = 96
    seed: int = 101  # of the usual scenes; validation and test have the two after it
    layers: tuple[str, ...] = ("last", "all")
    alphas: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    grid_on_test: bool = False  # every combination of layers and alpha on the test scenes too

    def grid(self) -> list[ReVisiT]:
        """Return all combinations of layers and alpha."""
        return [ReVisiT(layers=layers, alpha=alpha) for layers in self.layers for alpha in self.alphas]  # type: ignore[arg-type]


def ask(
    model: Any,
    processor: Any,
    questions: Sequence[tuple[Scene, str]],
    method: Method | None,
    batch: int,
    new_tokens: int,
) -> list[str]:
    """Return the model's answers to (scene, question) pairs, in their order."""
    out: list[str] = []
    for start in range(0, len(questions), batch):
        part = questions[start : start + batch]
        prompts, images = [question for _, question in part], [[render(drawn)] for drawn, _ in part]
        found = decode_prompts(
            model, processor, prompts, images, method or Greedy(), Decoding(max_new_tokens=new_tokens)
        )
        out += [answer.text for answer in found]
    return out


def truth(drawn: Scene) -> set[str]:
    """Return the COCO categories in a scene."""
    return {item.category.name for item in drawn.items}


def describe(
    model: Any, processor: Any, scenes: Sequence[Scene], method: Method | None, plan: Plan
) -> tuple[Scores, list[str]]:
    """Return CHAIR's scores for captions of some scenes, and the captions."""
    asked = [(drawn, chair.PROMPT) for drawn in scenes]
    captions = ask(model, processor, asked, method, plan.batch, plan.new_tokens)
    return chair.score_captions((s.key, found, truth(s)) for s, found in zip(scenes, captions, strict=True)), captions


def _describe_alone(job: tuple[str, list[Scene], Method | None, Plan]) -> tuple[Scores, list[str]]:
    """Run one method in its own process."""
    name, scenes, method, plan = job
    torch.set_num_threads(1)
    model, processor = load(name)
    return describe(model, processor, scenes, method, plan)


def describe_all(
    name: str, scenes: Sequence[Scene], methods: Sequence[Method | None], plan: Plan
) -> Iterator[tuple[Scores, list[str]]]:
    """Call `describe` for several methods, `plan.workers` at a time; yield the results in order."""
    if plan.workers == 1:
        model, processor = load(name)
        yield from (describe(model, processor, scenes, method, plan) for method in methods)
        return
    jobs = [(name, list(scenes), method, plan) for method in methods]
    with ProcessPoolExecutor(plan.workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_describe_alone, jobs)


def presence(
    model: Any, processor: Any, scenes: Sequence[Scene], method: Method | None, plan: Plan, likely: bool = False
) -> Scores:
    """Score balanced yes/no questions, one pair per scene; with `likely`, the absent object is typical of the place."""
    asked: list[tuple[Scene, str]] = []
    labels: list[str] = []
    for drawn in scenes:
        dice = Dice(f"{drawn.key}/ask")
        missing = [c for c in CATEGORIES if c.noun not in drawn.nouns]
        if likely:
            missing = [BY_NOUN[n] for n in drawn.place.usual if n not in drawn.nouns][:2] or missing
        pair = (BY_NOUN[dice.pick(drawn.nouns)], dice.pick(missing))
        asked += [(drawn, text.presence_question(category)) for category in pair]
        labels += ["yes", "no"]
    answers = ask(model, processor, asked, method, plan.batch, 4)
    return yes_no.score_answers((str(i), a, label) for i, (label, a) in enumerate(zip(labels, answers, strict=True)))


@dataclass(frozen=True)
class LensRow:
    """Recall@1 of a ground-truth object from single vision tokens of one layer, with Wilson intervals."""

    layer: int
    tokens: int
    objects: float
    objects_low: float
    objects_high: float
    full: float
    full_low: float
    full_high: float
    inside: float  # the same over the object vocabulary, only for patches that show an object


def lens(model: Any, processor: Any, scenes: Sequence[Scene], batch: int) -> list[LensRow]:
    """Read single vision tokens through the head, per hidden state, over the object words and over all tokens.

    A hit is any synonym of any object in the image, as in the paper. The last hidden state is after the final norm,
    the others are read as they are.
    """
    from revisit.embedded.scenes import patches

    tokenizer = processor.tokenizer
    ids = {w: tokenizer.encode(" " + w) for w in WORDS}
    single = {word: tokens[0] for word, tokens in ids.items() if len(tokens) == 1}
    vocabulary = torch.tensor(sorted(single.values()))
    depth = model.config.text_config.num_hidden_layers + 1
    hits = torch.zeros(depth, 3)
    total = inside_total = 0
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        inputs = prepare(processor, [chair.PROMPT] * len(part), [[render(s)] for s in part])
        with torch.inference_mode():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        slots = inputs["input_ids"] == model.config.image_token_id
        for row, drawn in enumerate(part):
            wanted = torch.tensor([token for word, token in single.items() if WORDS[word] in truth(drawn)])
            shown = torch.tensor([word in BY_NOUN for word in patches(drawn)[0]])
            total, inside_total = total + int(slots[row].sum()), inside_total + int(shown.sum())
            for layer, states in enumerate(hidden):
                logits = model.get_output_embeddings()(states[row][slots[row]])  # (slots, vocabulary)
                named = torch.isin(vocabulary[logits[:, vocabulary].argmax(-1)], wanted)
                likeliest = torch.isin(logits.argmax(-1), wanted)
                hits[layer] += torch.tensor([named.sum(), likeliest.sum(), named[shown].sum()])
    rows = []
    for layer, (objects, full, inside) in enumerate(hits.tolist()):
        bounds = (*wilson(objects, total), *wilson(full, total))
        rows.append(
            LensRow(
                layer, total, objects / total, bounds[0], bounds[1], full / total, bounds[2], bounds[3],
                inside / inside_total,
            )
        )  # fmt: skip
    return rows


def repetition_rate(captions: Sequence[str]) -> float:
    """Return the share of captions that name one object three times or more."""
    nouns = set(BY_NOUN)
    counts = (Counter(word for word in re.findall("[a-z]+", found.lower()) if word in nouns) for found in captions)
    return sum(max(c.values(), default=0) >= 3 for c in counts) / max(1, len(captions))


def chosen(greedy: Scores, tried: Sequence[tuple[ReVisiT, Scores]], repeats: Mapping[ReVisiT, float]) -> ReVisiT:
    """Return the settings with the least CHAIR_I among those whose F1 is at least greedy's; otherwise those with the best F1.

    Settings that repeat themselves in more than one caption of a hundred do not count: a caption that falls into repeating one object
    that is there has a very good CHAIR_I and describes nothing.
    """
    tried = [pair for pair in tried if repeats.get(pair[0], 0.0) <= MAX_REPETITION] or tried
    good = [pair for pair in tried if pair[1].metrics["F1"] >= greedy.metrics["F1"]]
    if good:
        return min(good, key=lambda pair: pair[1].metrics["CHAIRi"])[0]
    return max(tried, key=lambda pair: pair[1].metrics["F1"])[0]


def _row(name: str, scores: Scores, base: Scores | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"decoding": name}
    for metric in ("CHAIRs", "CHAIRi", "Recall", "F1"):
        row[metric] = 100 * scores.metrics[metric]
        if base is not None:
            apart = paired(base.per_item[metric], scores.per_item[metric])
            row[f"{metric} difference"] = [100 * v for v in (apart.difference, apart.low, apart.high)]
    row["Len"] = 100 * scores.metrics["Len"]
    return row


def label(method: ReVisiT) -> str:
    """Return the name of a method in a table."""
    special = "" if method.select == "min" else f", {method.select}"
    return f"ReVisiT {method.layers}, alpha {method.alpha:g}{special}"


def measure(name: str, plan: Plan) -> dict[str, Any]:
    """Measure everything for the model card."""
    model, processor = load(name)
    validation = [scene("unusual", plan.seed + 1, i) for i in range(plan.validation)]
    test = [scene("unusual", plan.seed + 2, i) for i in range(plan.test)]
    result: dict[str, Any] = {"plan": asdict(plan), **_usual(model, processor, plan)}

    grid = plan.grid()
    found = list(describe_all(name, validation, [None, *grid], plan))
    base, tried = found[0][0], [(method, scores) for method, (scores, _) in zip(grid, found[1:], strict=True)]
    repeats = [repetition_rate(captions) for _, captions in found]
    rows = [_row("greedy", base), *(_row(label(m), s, base) for m, s in tried)]
    result["validation"] = [{**row, "repetition_rate": 100 * share} for row, share in zip(rows, repeats, strict=True)]
    log.info("%s", _table(result["validation"]))
    best = chosen(base, tried, dict(zip(grid, repeats[1:], strict=True)))
    result["chosen"] = best.settings()

    methods = [best, best.replace(select="random", neighbors=1), best.replace(select="max")]
    methods += [m for m in grid if m != best] if plan.grid_on_test else []
    found = list(describe_all(name, test, [None, *methods], plan))
    rows = [
        _row("greedy", found[0][0]),
        *(_row(label(m), s, found[0][0]) for m, (s, _) in zip(methods, found[1:], strict=True)),
    ]
    result["test"] = [
        {**row, "repetition_rate": 100 * repetition_rate(captions)}
        for row, (_, captions) in zip(rows, found, strict=True)
    ]
    log.info("%s", _table(result["test"]))
    for likely in (False, True):
        asked = test[: plan.validation]
        plain, refined = (presence(model, processor, asked, m, plan, likely) for m in (None, best))
        apart = paired(plain.per_item["accuracy"], refined.per_item["accuracy"])
        result["test presence" + (", likely" if likely else "")] = {
            "greedy": plain.metrics["accuracy"],
            "revisit": refined.metrics["accuracy"],
            "difference": [apart.difference, apart.low, apart.high],
        }
    return result


def _usual(model: Any, processor: Any, plan: Plan) -> dict[str, Any]:
    """Measure greedy decoding and the lens on usual scenes."""
    usual = [scene("usual", plan.seed, i) for i in range(plan.usual)]
    scores, captions = describe(model, processor, usual, None, plan)
    out: dict[str, Any] = {"usual": _row("greedy", scores), "examples": captions[:8]}
    out["usual presence"] = presence(model, processor, usual, None, plan).metrics["accuracy"]
    out["usual presence, likely"] = presence(model, processor, usual, None, plan, likely=True).metrics["accuracy"]
    log.info("usual: %s, presence %.3f", out["usual"], out["usual presence"])
    out["lens"] = [asdict(row) for row in lens(model, processor, usual[:200], plan.batch)]
    for row in out["lens"]:
        log.info(
            f"lens {row['layer']}: objects {row['objects']:.3f}, full {row['full']:.3f}, inside {row['inside']:.3f}"
        )
    return out


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| decoding | CHAIR_S | CHAIR_I | recall | F1 | words | stuck, % |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = []
        for metric in ("CHAIRs", "CHAIRi", "Recall", "F1"):
            apart = row.get(f"{metric} difference")
            extra = "" if apart is None else f" ({apart[0]:+.2f} [{apart[1]:+.2f}, {apart[2]:+.2f}])"
            cells.append(f"{row[metric]:.2f}{extra}")
        lines.append(f"| {row['decoding']} | {' | '.join(cells)} | {row['Len']:.0f} | {row['repetition_rate']:.1f} |")
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    """Write the results as tables."""
    plan, usual = result["plan"], result["usual"]
    lens_rows = "\n".join(
        f"| {r['layer']} | {r['objects']:.1%} [{r['objects_low']:.1%}, {r['objects_high']:.1%}] "
        f"| {r['full']:.1%} [{r['full_low']:.1%}, {r['full_high']:.1%}] | {r['inside']:.1%} |"
        for r in result["lens"]
    )
    asked = [
        f"- presence, {name}: {100 * v['greedy']:.1f} greedy, {100 * v['revisit']:.1f} ReVisiT "
        f"({100 * v['difference'][0]:+.2f} [{100 * v['difference'][1]:+.2f}, {100 * v['difference'][2]:+.2f}])"
        for name, v in (
            ("absent object any", result["test presence"]),
            ("absent object a core one of the place", result["test presence, likely"]),
        )
    ]
    return f"""\
Usual scenes ({plan["usual"]}, greedy): CHAIR_S {usual["CHAIRs"]:.1f}, CHAIR_I {usual["CHAIRi"]:.1f}, \
recall {usual["Recall"]:.1f}, F1 {usual["F1"]:.1f}; presence accuracy {100 * result["usual presence"]:.1f} % \
(absent object any), {100 * result["usual presence, likely"]:.1f} % (absent object likely for the place).

Lens, recall@1 of an object of the image from single vision tokens [95 % Wilson interval]:

| hidden state | over object words | over all tokens | over object words, patches that show an object |
|---|---|---|---|
{lens_rows}

Unusual scenes, validation ({plan["validation"]}); difference to greedy [95 % paired bootstrap interval]:

{_table(result["validation"])}

Unusual scenes, test ({plan["test"]}); the first ReVisiT row has the settings chosen on validation:

{_table(result["test"])}

Unusual scenes, questions:

{chr(10).join(asked)}
"""


def report(name: str, plan: Plan, out: Path) -> str:
    """Measure a model and write report.json and report.md."""
    out.mkdir(parents=True, exist_ok=True)  # before the work: a place that cannot be written fails at once
    result = measure(name, plan)
    (out / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "report.md").write_text(markdown(result))
    return markdown(result)
