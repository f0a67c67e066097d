"""POPE: "Is there a ... in the image?", half yes and half no, in nine settings; RePOPE: the same with corrected labels; DASH-B:
images that invite a false yes.

Data: the official question files (AoiDragon/POPE `output/`, or VCD's copies) and the COCO val2014 and GQA images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import COCO_LICENSE, HubDataset, Item, Scores
from revisit.eval.benchmarks.io.data import Draft
from revisit.eval.benchmarks.yes_no import RECALLS, ImageSource, Parser, Questions, YesNo, score_recalls
from revisit.io.records import Record

COCO = ImageSource(("val2014", "images"), ("http://images.cocodataset.org/val2014",))
# GQA's images are those of Visual Genome, which keeps them in two folders.
GQA = ImageSource(
    ("gqa", "gqa/images", "images"),
    ("https://cs.stanford.edu/people/rak248/VG_100K", "https://cs.stanford.edu/people/rak248/VG_100K_2"),
)
# The published files at one commit each.
_POPE = "https://raw.githubusercontent.com/AoiDragon/POPE/08d957b917e5a378a2f99d35b6293c536a66298b/output"
_REPOPE = "https://raw.githubusercontent.com/YanNeu/RePOPE/bcf22e5690d587cce34e1728af3efdcfaf747d29/annotations"
KINDS = ("random", "popular", "adversarial")


def _pope(source: str, kind: str) -> Questions:
    names = (f"{source}_pope_seem_{kind}.json", f"{source}_pope_{kind}.json")
    names = names[::-1] if source == "coco" else names
    url = f"{_POPE}/{'coco' if source == 'coco' else f'seem/{source}'}/{names[0]}"
    images = GQA if source == "gqa" else COCO
    return Questions(f"{source}_{kind}", names, images, url)


class Pope(YesNo):
    """POPE: {coco, aokvqa, gqa} x {random, popular, adversarial}."""

    name = "pope"
    title = "POPE"
    source = "https://github.com/AoiDragon/POPE, output/coco and output/seem"
    license = f"questions MIT; COCO: {COCO_LICENSE}; GQA's images (Visual Genome) CC BY 4.0"
    question_files = tuple(_pope(source, kind) for source in ("coco", "aokvqa", "gqa") for kind in KINDS)


class RePope(YesNo):
    """RePOPE: POPE's three COCO settings with corrected labels and without ambiguous questions."""

    parser: Parser = "repope"

    name = "repope"
    title = "RePOPE"
    source = "https://github.com/YanNeu/RePOPE, annotations"
    license = f"RePOPE: none stated by its authors; {COCO_LICENSE}"
    question_files = tuple(
        Questions(f"coco_{k}", (f"coco_repope_{k}.json",), COCO, f"{_REPOPE}/coco_repope_{k}.json") for k in KINDS
    )


class DashB(YesNo):
    """DASH-B: images that invite a false "yes", and as many that show the object, for 70 objects; from its Hub dataset."""

    parser: Parser = "dash_b"

    name = "dash_b"
    title = "DASH-B"
    source = "the Hub dataset YanNeu/DASH-B, by `revisit data get dash_b DIR`"
    license = "unknown"
    headline = "harmonic"
    metrics = RECALLS
    question_files = (Questions("dash_b", ("questions.jsonl",), ImageSource(("dash_b/images", "images"))),)
    hub = HubDataset(("YanNeu/DASH-B",), ("test",))

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
