"""Case studies: the steps at which ReVisiT changed the token, candidate by candidate.

Changed steps are sorted by the token that the model alone would have chosen and the one chosen instead: a word for something in the image
("shown"), a word for something that is not ("absent"), or no object word ("other").
"""

from __future__ import annotations

import math
from collections import Counter

from revisit.decoding.trace import StepRecord
from revisit.eval.report.document import Block, Table, Text
from revisit.eval.run import Reporter
from revisit.methods import as_method
from revisit.methods.revisit import ReVisiT
from revisit.models.types import Tokenizer
from revisit.paper.study import Result, Stored, Subject, percent

CANDIDATES = 20  # listed for a case
CASES = 4  # printed in full


def case_studies(subject: Subject, reporter: Reporter) -> Result:
    """Count the changes by kind, and collect the corrections in which the model alone was most confident."""
    model, processor = subject.loaded
    method = as_method(subject.methods[0], model)
    assert isinstance(method, ReVisiT)  # which the command checks
    vocabulary = subject.vocabulary
    changes: Counter[str] = Counter()
    steps = 0
    cases: list[tuple[bool, float, Result]] = []
    for item, answer in subject.decode(method, reporter, "case studies"):
        shown = {vocabulary.ids[index] for index in vocabulary.indices(item.meta["ground_truth"])}
        steps += len(answer.steps)
        for number, record in enumerate(answer.steps):
            if not record.changed:
                continue
            kind = " → ".join(
                "shown" if token in shown else "absent" if token in vocabulary.ids else "other"
                for token in (record.instead_of, record.ids[0])
            )
            changes[kind] += 1
            about = {
                "image": item.id,
                "so_far": processor.tokenizer.decode(answer.tokens[:number], skip_special_tokens=True),
                "step": number,
                "change": kind,
                "ground_truth": item.meta["ground_truth"],
                "layer": record.layer,
                "vision_token": record.vision_token,
                "plausible_tokens": record.plausible_tokens,
                "rows": rows_of(record, method, processor.tokenizer),
            }
            cases.append((kind != "absent → shown", -max(record.base), about))
    cases.sort(key=lambda case: case[:2])
    return {
        "method": {"name": method.name, **method.settings()},
        "images": len(subject.items),
        "steps": steps,
        "changes": dict(changes.most_common()),
        "cases": [about for _, _, about in cases[:CASES]],
    }


def rows_of(record: StepRecord, method: ReVisiT, tokenizer: Tokenizer) -> list[Result]:
    """Return log-probability and probability (%) of base, vision and final distribution for the best candidates.

    The fused score is that of the paper, before normalization: log base + weight · log vision.
    """
    rows = []
    for index, token in enumerate(record.ids[:CANDIDATES]):
        base, final = record.base[index], record.final[index]
        vision = record.vision[index] if record.vision is not None else math.nan
        fused = _log(base) + (record.weight or 0.0) * _log(vision) if method.fusion == "poe" else _log(final)
        text = tokenizer.decode([token])
        pairs = {
            "base": [_log(base), 100 * base],
            "vision": [_log(vision), 100 * vision],
            "final": [fused, 100 * final],
        }
        rows.append({"token": text.strip() or repr(text), **pairs})
    return rows


def _log(p: float) -> float:
    return math.log(p) if p > 0 else -999.0


def draw(result: Stored, name: str) -> list[Block]:
    """Draw the changes by kind, and a table for each case."""
    changed = sum(result["changes"].values())
    text = (
        f"{result['steps']:,} steps over {result['images']} images, {changed:,} of them changed: the token of the model alone → the token "
        "chosen instead, by kind of word: shown (names something in the image), absent (names something that is not), other."
    )
    kinds = [(kind, f"{n:,}", f"{percent(n / changed, 1)} %") for kind, n in result["changes"].items()]
    blocks: list[Block] = [Text(text), Table(("Change", "steps", "share of changes"), kinds, "Changed steps by kind.")]
    for case in result["cases"]:
        lines = []
        for rank, row in enumerate(case["rows"], 1):
            pairs = [row[name] for name in ("base", "vision", "final")]
            cells = [text for log, p in pairs for text in ("−∞" if log <= -998 else f"{log:.2f}", f"{p:.2f}")]
            lines.append((str(rank), row["token"], *cells))
        where = f"layer {case['layer']}, vision token {case['vision_token']}"
        caption = (
            f"Image {case['image']}, step {case['step']} after “…{case['so_far'][-60:]}” ({case['change']}; "
            f"{where if case['layer'] is not None else 'no vision token'}; {case['plausible_tokens']} plausible tokens). "
            f"In the image: {', '.join(case['ground_truth'])}."
        )
        groups = (("base", 2), ("vision token", 2), ("final", 2))
        blocks.append(Table(("Rank", "Token", *("log-prob", "%") * 3), lines, caption, groups=groups, left=2))
    return blocks
