"""Write benchmarks of held-out scenes in the official file formats.

`--data scenes:SPLIT:NUMBER:SEED` writes such a folder into the cache; docs/benchmarks.md describes it. meta.json contains the
arguments, and scenes.jsonl the place, objects and boxes of every image.

POPE names objects by the nouns of the captions ("table" for the category `dining table`), which are CHAIR synonyms of their
category. Absent objects are random (random), the most frequent in the folder (popular), or typical of the image's place,
core objects first (adversarial).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from revisit import words
from revisit.embedded import text
from revisit.embedded.catalog import BY_NOUN, CATEGORIES
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import SIZE, Scene, all_seen, render, scene

GENERATOR = 1  # incremented whenever a seed gives different images or questions
# Official ids and names; ten numbers are unused.
COCO = dict(zip(sorted({*range(1, 91)} - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}), words.CATEGORIES, strict=True))


def build(folder: Path, split: str, n: int, seed: int) -> None:
    """Write all files for n held-out scenes of a split into a folder."""
    scenes: dict[int, Scene] = {}
    (folder / "val2014").mkdir(parents=True, exist_ok=True)
    for image_id in range(1, n + 1):
        scenes[image_id] = scene(split, seed, image_id - 1)
        render(scenes[image_id]).save(folder / "val2014" / file_name(image_id))
    _write(folder / "meta.json", {"split": split, "n": n, "seed": seed, "generator": GENERATOR})
    _write_lines(folder / "scenes.jsonl", (_scene_row(i, s) for i, s in scenes.items()))
    _coco(folder / "annotations", scenes)
    _pope(folder / "pope", scenes)
    _hallusion(folder / "hallusionbench", scenes)
    _vqa(folder / "vqav2", scenes)
    _mmmu(folder / "mmmu", scenes)


def file_name(image_id: int) -> str:
    """Return the COCO-style name of an image file."""
    return f"COCO_val2014_{image_id:012d}.png"


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _scene_row(image_id: int, drawn: Scene) -> dict[str, object]:
    objects = [
        {"category": i.category.name, "noun": i.noun, "colour": i.color, "bbox": list(i.bbox)} for i in drawn.items
    ]
    return {"image_id": image_id, "file_name": file_name(image_id), "place": drawn.place_name, "objects": objects}


def _coco(folder: Path, scenes: dict[int, Scene]) -> None:
    images = [{"id": i, "file_name": file_name(i), "width": SIZE, "height": SIZE} for i in scenes]
    boxes: list[dict[str, object]] = []
    captions: list[dict[str, object]] = []
    for image_id, drawn in scenes.items():
        for item in drawn.items:
            ids = {"id": len(boxes) + 1, "image_id": image_id, "category_id": item.category.id}
            boxes.append({**ids, "bbox": list(item.bbox), "area": int(item.pixels()[1].sum()), "iscrowd": 0})
        for k in range(5):
            written = text.caption(drawn, Dice(f"{drawn.key}/caption/{k}"))
            captions.append({"id": len(captions) + 1, "image_id": image_id, "caption": written})
    categories = [{"id": i, "name": name} for i, name in COCO.items()]
    _write(folder / "instances_val2014.json", {"images": images, "annotations": boxes, "categories": categories})
    _write(folder / "captions_val2014.json", {"images": images, "annotations": captions})


def _pope(folder: Path, scenes: dict[int, Scene]) -> None:
    frequency = Counter(noun for drawn in scenes.values() for noun in drawn.nouns)
    by_frequency = sorted((c.noun for c in CATEGORIES), key=lambda noun: -frequency[noun])
    for setting in ("random", "popular", "adversarial"):
        rows: list[dict[str, object]] = []
        for image_id, drawn in scenes.items():
            dice = Dice(f"{drawn.key}/pope/{setting}")
            present = dice.sample(drawn.nouns, 3)
            candidates = {
                "random": dice.shuffled([c.noun for c in CATEGORIES]),
                "popular": by_frequency,
                "adversarial": [*drawn.place.usual, *by_frequency],
            }[setting]
            absent = [noun for noun in candidates if noun not in drawn.nouns][: len(present)]
            for pair in zip(present, absent, strict=True):
                for noun, label in zip(pair, ("yes", "no"), strict=True):
                    ids = {"question_id": len(rows) + 1, "image": file_name(image_id)}
                    rows.append({**ids, "text": text.presence_question(BY_NOUN[noun]), "label": label})
        _write_lines(folder / f"coco_pope_{setting}.json", rows)


def _edited(drawn: Scene, dice: Dice) -> tuple[str, str, Scene]:
    """Replace a noun of the scene; return the old noun, the new one, and the changed scene."""
    while True:
        old, new = dice.pick(drawn.nouns), dice.pick(CATEGORIES).noun
        if new in drawn.nouns:
            continue
        items = tuple(replace(i, noun=new, color=None) if i.noun == old else i for i in drawn.items)
        if all_seen(items):
            return old, new, replace(drawn, items=items)


def _hallusion(folder: Path, scenes: dict[int, Scene]) -> None:
    """Write one set for every fifth scene: the same two questions before and after an object is replaced."""
    rows: list[dict[str, object]] = []
    (folder / "VD" / "scene").mkdir(parents=True)
    for set_id, drawn in enumerate(list(scenes.values())[::5]):
        old, new, changed = _edited(drawn, Dice(f"{drawn.key}/edit"))
        for figure, version in enumerate((drawn, changed)):
            name = f"VD/scene/{set_id}_{figure}.png"
            render(version).save(folder / name)
            for question_id, noun in enumerate((old, new)):
                there, category = noun in version.nouns, BY_NOUN[noun]
                ids = {"set_id": str(set_id), "figure_id": str(figure), "question_id": str(question_id)}
                row = {"category": "VD", "subcategory": "scene", "visual_input": str(figure + 1), **ids}
                row["question"] = text.presence_question(category)
                row["gt_answer_details"] = text.presence_answer(category, there)
                rows.append({**row, "gt_answer": str(int(there)), "filename": f"./{name}"})
    _write(folder / "HallusionBench.json", rows)


def _vqa_turns(drawn: Scene, dice: Dice) -> list[tuple[str, str, str, str]]:
    """Make up to three questions: question type, answer type, question and short answer."""
    there = dice.chance(0.5)
    category = BY_NOUN[dice.pick(drawn.nouns)] if there else text.absent(drawn, dice)
    out = [("is there a", "yes/no", text.presence_question(category), "yes" if there else "no")]
    out.append(("how many", "number", *text.count(drawn, dice.pick(drawn.nouns))))
    for noun in dice.shuffled(drawn.nouns):
        if found := text.color(drawn, noun):
            return [*out, ("what color is the", "other", *found)]
        if found := text.position(drawn, noun):
            return [*out, ("where is the", "other", found[0], found[1].split()[-1])]
    return out


def _ten_answers(kind: str, right: str, dice: Dice) -> list[dict[str, object]]:
    """Make ten annotations: half of the questions are unanimous, the others have one to three dissenting answers."""
    wrong = {"yes/no": ("yes", "no"), "number": ("1", "2", "3"), "other": ("gray", "middle", "brown")}[kind]
    other = dice.pick([w for w in wrong if w != right])
    dissent = 0 if dice.chance(0.5) else 1 + dice.below(3)
    answers = dice.shuffled([right] * (10 - dissent) + [other] * dissent)
    return [{"answer": answer, "answer_id": i} for i, answer in enumerate(answers, 1)]


def _vqa(folder: Path, scenes: dict[int, Scene]) -> None:
    questions, annotations = [], []
    for image_id, drawn in scenes.items():
        dice = Dice(f"{drawn.key}/vqa")
        for k, (question_type, kind, question, answer) in enumerate(_vqa_turns(drawn, dice)):
            ids = {"image_id": image_id, "question_id": image_id * 1000 + k}
            questions.append({**ids, "question": question})
            types = {"question_type": question_type, "answer_type": kind, "multiple_choice_answer": answer}
            annotations.append({**ids, **types, "answers": _ten_answers(kind, answer, dice)})
    _write(folder / "v2_OpenEnded_mscoco_val2014_questions.json", {"questions": questions})
    _write(folder / "v2_mscoco_val2014_annotations.json", {"annotations": annotations})


def _mmmu(folder: Path, scenes: dict[int, Scene]) -> None:
    rows: list[dict[str, object]] = []
    number: Counter[str] = Counter()
    for image_id, drawn in scenes.items():
        question, options, right = text.multiple_choice(drawn, Dice(f"{drawn.key}/mmmu"))
        subject = "Color" if "color" in question else "Object"
        number[subject] += 1
        row = {"id": f"validation_{subject}_{number[subject]}", "question": question, "options": options}
        row |= {"answer": chr(65 + right), "question_type": "multiple-choice", "subject": subject}
        rows.append({**row, "images": [f"val2014/{file_name(image_id)}"]})
    _write_lines(folder / "questions.jsonl", rows)
