"""Write photos that were never trained on in the formats of CHAIR and POPE, for `revisit eval --data`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from revisit.words import CATEGORIES
from training.photo.data import Labels, Photos
from training.photo.texts import Texts, presence_question

SETTINGS = {"random": 0.0, "adversarial": 1.0}  # share of absent objects that are often seen with the present ones


def write_benchmark(folder: Path, photos: Photos, labels: Labels, ids: Sequence[int], seed: int) -> None:
    """Write the photos, CHAIR's ground truth, and two questions for each photo with objects, one answered by yes and one by no.

    Photos are named as in val2014. The questions have POPE's form, but their objects are drawn here.
    """
    (folder / "val2014").mkdir(parents=True, exist_ok=True)
    for name in ("chair", "pope"):
        (folder / name).mkdir(exist_ok=True)
    with photos:
        for photo in ids:
            (folder / "val2014" / _file(photo)).write_bytes(photos.data(photo))
    truth = {str(photo): [CATEGORIES[k] for k in labels.objects[photo]] for photo in ids}
    (folder / "chair" / "ground_truth.json").write_text(json.dumps(truth))
    texts = Texts(labels.objects, {})
    for setting, likely in SETTINGS.items():
        rows: list[dict[str, object]] = []
        for photo in ids:
            if not (present := labels.objects[photo]):
                continue
            dice = random.Random(f"{seed}/{setting}/{photo}")
            for label, asked in (("yes", dice.choice(present)), ("no", texts.absent(photo, dice, likely))):
                question = presence_question(CATEGORIES[asked])
                rows.append({"question_id": len(rows) + 1, "image": _file(photo), "text": question, "label": label})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "pope" / f"coco_pope_{setting}.json").write_text(lines)


def _file(photo: int) -> str:
    return f"COCO_val2014_{photo:012}.jpg"
