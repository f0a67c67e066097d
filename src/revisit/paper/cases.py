"""Case studies: the steps at which ReVisiT changed its mind about an object, candidate by candidate.

Every changed step is sorted by what the model alone would have written and what was written instead: a word for
something in the picture ("shown"), for something that is not ("absent"), or no object word ("other").
"""

from __future__ import annotations

import math
from collections import Counter

from revisit.decoding.loop import generate
from revisit.decoding.trace import StepRecord, Trace
from revisit.evaluation.runner import Reporter
from revisit.methods.revisit import ReVisiT
from revisit.models.prompts import new_tokens
from revisit.models.types import Tokenizer
from revisit.paper.study import Result, Subject, track

ROWS = 20


def case_studies(subject: Subject, method: ReVisiT, count: int, reporter: Reporter) -> Result:
    """How often each kind of change happened, and the `count` corrections in which the model alone was surest."""
    model, processor = subject.loaded
    vocabulary = subject.vocabulary
    names = dict(zip(vocabulary.ids, vocabulary.words, strict=True))
    changes: Counter[str] = Counter()
    steps = 0
    found: list[tuple[bool, float, Result]] = []
    for item in track(reporter, "case studies", subject.items):
        shown = {vocabulary.ids[place] for place in vocabulary.places(item.meta["ground_truth"])}
        inputs = subject.inputs([item])
        trace = Trace(record=True)
        output = generate(
            model, **inputs, method=method, trace=trace, do_sample=False, max_new_tokens=subject.max_new_tokens
        )
        tokens = new_tokens(output, inputs)[0].tolist()
        records = trace.rows[0].records
        steps += len(records)
        for number, record in enumerate(records):
            if not record.changed:
                continue
            before, after = record.favorite, record.ids[0]
            kind = f"{_kind(before, shown, names)} → {_kind(after, shown, names)}"
            changes[kind] += 1
            about = {
                "image": item.id,
                "prompt": item.prompt,
                "so_far": processor.tokenizer.decode(tokens[:number], skip_special_tokens=True),
                "step": number,
                "change": kind,
                "ground_truth": item.meta["ground_truth"],
                "layer": record.layer,
                "vision_token": record.index,
                "divergence": record.divergence,
                "set_size": record.set_size,
                "rows": rows_of(record, method, processor.tokenizer),
            }
            found.append((kind != "absent → shown", -max(record.base), about))
    found.sort(key=lambda entry: entry[:2])
    return {
        "method": {"name": method.name, **method.settings()},
        "images": len(subject.items),
        "steps": steps,
        "changes": dict(changes.most_common()),
        "cases": [about for _, _, about in found[:count]],
    }


def _kind(token: int, shown: set[int], names: dict[int, str]) -> str:
    return "shown" if token in shown else "absent" if token in names else "other"


def rows_of(record: StepRecord, method: ReVisiT, tokenizer: Tokenizer) -> list[Result]:
    """The best candidates: log-probability and probability (%) of base and vision, fused score and final probability.

    The fused score is printed as in the paper, before it is normalized: log base + weight · log vision.
    """
    rows = []
    for place, token in list(enumerate(record.ids))[:ROWS]:
        base, final = record.base[place], record.final[place]
        vision = record.vision[place] if record.vision is not None else math.nan
        fused = _log(base) + (record.weight or 0.0) * _log(vision) if method.fusion == "poe" else _log(final)
        rows.append(
            {
                "token": tokenizer.decode([token]).strip() or repr(tokenizer.decode([token])),
                "base": [_log(base), 100 * base],
                "vision": [_log(vision), 100 * vision],
                "final": [fused, 100 * final],
            }
        )
    return rows


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -999.0
