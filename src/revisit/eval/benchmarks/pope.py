"""POPE: "Is there a ... in the image?", half yes and half no, in nine settings; RePOPE: the same with corrected labels; DASH-B:
images that invite a false yes.

Data: the official question files (AoiDragon/POPE `output/`, or VCD's copies) and the COCO val2014 and GQA images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.benchmarks.io.data import Draft
from revisit.eval.benchmarks.yes_no import RECALLS, ImageSource, Parser, Questions, YesNo, score_recalls
from revisit.io.records import Record

COCO = ImageSource(("val2014", "images"), ("http://images.cocodataset.org/val2014",))
# GQA's images are those of Visual Genome, which keeps them in two folders.
GQA = ImageSource(
    ("gqa", "gqa/images", "images"),
    ("https://cs.stanford.edu/people/rak248/VG_100K", "https://cs.stanford.edu/people/rak248/VG_100K_2"),
)
KINDS = ("random", "popular", "adversarial")


def _pope(source: str, kind: str) -> Questions:
    names = (f"{source}_pope_seem_{kind}.json", f"{source}_pope_{kind}.json")
    return Questions(f"{source}_{kind}", names, GQA if source == "gqa" else COCO)


class Pope(YesNo):
    """POPE: {coco, aokvqa, gqa} x {random, popular, adversarial}."""

    name = "pope"
    question_files = tuple(_pope(source, kind) for source in ("coco", "aokvqa", "gqa") for kind in KINDS)


class RePope(YesNo):
    """RePOPE: POPE's three COCO settings with corrected labels and without ambiguous questions."""

    parser: Parser = "repope"

    name = "repope"
    question_files = tuple(Questions(f"coco_{kind}", (f"coco_repope_{kind}.json",), COCO) for kind in KINDS)


class DashB(YesNo):
    """DASH-B: images that invite a false "yes", and as many that show the object, for 70 objects; from its Hub dataset."""

    parser: Parser = "dash_b"

    name = "dash_b"
    headline = "harmonic"
    metrics = RECALLS
    question_files = (Questions("dash_b", ("questions.jsonl",), ImageSource(("dash_b/images", "images"))),)

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write the question file; an image has the number of its question."""
        for row in rows:
            number = str(row["question_id"])
            image = Path(out.image(f"dash_b/images/{number}", row["image"], row.where)).name
            label = row.need_choice("answer", ("yes", "no"))
            entry = {"question_id": number, "image": image, "text": row["question"], "label": label}
            out.add("dash_b/questions.jsonl", entry | {"object": row["object"]})

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        return score_recalls(((item.id, answers[item.id], item.meta["label"]) for item in items), self.parser)
