"""Generated scenes laid out like the paper's data, so that `revisit reproduce --model tiny --data` has values in all cells of all tables.

POPE's questions are spread over its nine settings, MMMU's over its thirty subjects, and LLaVA-Bench's files describe the same images.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from revisit.embedded.build import build
from revisit.eval.benchmarks.chair import PROMPT
from revisit.eval.benchmarks.io.drafts import Draft
from revisit.eval.benchmarks.mmmu import SUBJECTS
from revisit.explain.files import new_folder

PICTURES = 30  # one for each subject of MMMU
CAPTIONED = 4  # of them, for CHAIR and LLaVA-Bench
SOURCES, KINDS = ("coco", "aokvqa", "gqa"), ("random", "popular", "adversarial")  # POPE's settings
ASKED = 9  # of them, for POPE (three to each source) and VQAv2
QUESTIONS = 2  # about each of those, in one setting of POPE
FOLDER = "scenes"


def stand_in_data(out: Path) -> Path:
    """The folder below `out`, made on first use; whole or not there."""
    folder = out / FOLDER
    if not folder.is_dir():
        with new_folder(folder) as root:
            draft = Draft(root, root)
            build(root, "unusual", PICTURES, seed=0)
            for relabel in (_pope, _mmmu, _vqav2, _coco, _llava_bench):
                relabel(draft)
    return folder


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _pope(draft: Draft) -> None:
    """Every third image's questions to each source; GQA's images in a folder of their own."""
    for kind in KINDS:
        path = draft.root / f"pope/coco_pope_{kind}.json"
        by_image: dict[str, list[dict[str, Any]]] = {}
        for row in _lines(path):
            by_image.setdefault(row["image"], []).append(row)
        path.unlink()
        for number, (image, rows) in enumerate(list(by_image.items())[:ASKED]):
            source = SOURCES[number % len(SOURCES)]
            if source == "gqa":
                draft.image(f"gqa/{image}", (draft.root / "val2014" / image).read_bytes(), image, named=True)
            for row in rows[:QUESTIONS]:
                draft.add(f"pope/{source}_pope_{kind}.json", row)
    draft.close()


def _mmmu(draft: Draft) -> None:
    """One question to each subject."""
    rows = _lines(draft.root / "mmmu/questions.jsonl")
    named = [
        {**row, "id": f"validation_{subject}_1", "subject": subject}
        for row, subject in zip(rows, SUBJECTS, strict=True)
    ]
    draft.text("mmmu/questions.jsonl", "".join(json.dumps(row) + "\n" for row in named))


def _vqav2(draft: Draft) -> None:
    """The first questions about each image."""
    name = "vqav2/v2_OpenEnded_mscoco_val2014_questions.json"
    asked = json.loads((draft.root / name).read_text("utf-8"))
    by_image: dict[int, list[dict[str, Any]]] = {}
    for question in asked["questions"]:
        by_image.setdefault(question["image_id"], []).append(question)
    asked["questions"] = [question for rows in list(by_image.values())[:ASKED] for question in rows[:QUESTIONS]]
    kept = {question["question_id"] for question in asked["questions"]}
    draft.text(name, json.dumps(asked))
    name = "vqav2/v2_mscoco_val2014_annotations.json"
    notes = json.loads((draft.root / name).read_text("utf-8"))
    notes["annotations"] = [note for note in notes["annotations"] if note["question_id"] in kept]
    draft.text(name, json.dumps(notes))


def _coco(draft: Draft) -> None:
    """The first images only."""
    for name in ("instances", "captions"):
        path = f"annotations/{name}_val2014.json"
        notes = json.loads((draft.root / path).read_text("utf-8"))
        notes["images"] = notes["images"][:CAPTIONED]
        kept = {image["id"] for image in notes["images"]}
        notes["annotations"] = [note for note in notes["annotations"] if note["image_id"] in kept]
        draft.text(path, json.dumps(notes))


def _llava_bench(draft: Draft) -> None:
    """A request for a description of each of the first images; a caption of the scene is context and reference."""
    captions = json.loads((draft.root / "annotations/captions_val2014.json").read_text("utf-8"))
    captioned = {note["image_id"]: note["caption"] for note in captions["annotations"]}
    (draft.root / "llava_bench/images").mkdir(parents=True)
    for image in captions["images"]:
        number, name = image["id"], image["file_name"]
        shutil.copy(draft.root / "val2014" / name, draft.root / "llava_bench/images" / name)
        question = {"question_id": number, "image": name, "text": PROMPT, "category": "detail"}
        draft.add("llava_bench/questions.jsonl", question)
        draft.add("llava_bench/context.jsonl", {"id": str(number), "image": name, "caption": captioned[number]})
        draft.add(
            "llava_bench/answers_gpt4.jsonl", {"question_id": number, "prompt": PROMPT, "text": captioned[number]}
        )
    draft.close()
