"""Detectors on texts whose wrong words are labeled: DetailVerifyBench and HalLoc.

The first half of the texts sets each threshold, the second half measures.
"""

from __future__ import annotations

from revisit.eval.report.document import Block, Table
from revisit.eval.run import Reporter
from revisit.paper.check import Reader, Stated
from revisit.paper.detectors import DETECTORS
from revisit.paper.study import Result, Stored, Subject, number, track
from revisit.paper.word_labels import Scored, choose_threshold, score_words


def word_labels(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: AUROC, average precision and F1 of every detector over all words, and by kind of mistake."""
    reader, texts = Reader(subject), [item.meta["labeled"] for item in subject.items]
    found: dict[str, list[Scored]] = {name: [] for name in DETECTORS}
    for item, text in zip(track(reporter, "texts", subject.items), texts, strict=True):
        words = list(reader.words(item, {"": Stated(text.text, lambda _: ("word", True))}))
        for name, scored in found.items():
            scored.append([(*place, scores[name]) for _, place, _, scores in words])
    half = len(texts) // 2
    rows = [
        {"name": name, **score_words(texts[half:], scored[half:], choose_threshold(texts[:half], scored[:half]))}
        for name, scored in found.items()
    ]
    return {"texts": len(texts) - half, "rows": rows}


def draw(result: Stored, name: str) -> list[Block]:
    """Draw one row per detector, and its AUROC by kind of mistake."""
    measures = ("auroc", "average_precision", "f1", "text_f1")
    lines = [(row["name"], *(number(row[key], 3) for key in measures)) for row in result["rows"]]
    first = result["rows"][0]
    kinds = list(first["kinds"])
    by_kind = [(row["name"], *(number(row["kinds"][kind]["auroc"], 3) for kind in kinds)) for row in result["rows"]]
    caption = (
        f"{first['words']} words of {result['texts']} texts, {first['wrong']} of them wrong. Token F1 over all words, and its mean over "
        "texts, in which a text without wrong words counts 0."
    )
    return [
        Table(("Score", "AUROC", "average precision", "F1", "F1 by text"), lines, caption),
        Table(("Score", *kinds), by_kind, "AUROC by kind of mistake, against all right words."),
    ]
