"""PhD: yes/no questions of five tasks about COCO's images, plain (base), after an inaccurate (iac) or an incorrect (icc) text, and
about generated images that contradict common sense (ccs). Every question has a twin with the other answer.

The PhD index of a mode and task is the harmonic mean of the recalls of yes and no, as its README defines it. Its authors released no
parser of answers; the default is DASH-B's rule. Data: data.json (jiazhen-code/PhD), COCO's train2014 and
val2014 images, and the authors' archive CCS_images.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from revisit.eval.benchmarks.base import Benchmark, Item, PerUnit, Scores, coco_image
from revisit.eval.benchmarks.io.download import Remote
from revisit.eval.benchmarks.yes_no import RECALLS, Parser, score_recalls
from revisit.io import records
from revisit.io.records import Record

Mode = Literal["base", "iac", "icc", "ccs"]
MODES: tuple[Mode, ...] = ("base", "iac", "icc", "ccs")
INSTRUCTION = (
    " In case there is an inconsistency between the context and the image content, you should follow the image. "
)
_CCS = "https://drive.usercontent.google.com/download?id=1qYW6TfW-C8qz_9gXOpw2BwE-2DyN9NP-&export=download&confirm=t"


class PhD(Benchmark):
    """PhD in its four modes.

    Args:
        modes: The modes to use, such as "base,ccs"; all by default.
        parser: The rule that parses answers, as in POPE.
    """

    modes: tuple[Mode, ...] = MODES
    parser: Parser = "dash_b"

    name = "phd"
    rule_options = ("parser",)
    max_new_tokens = 64
    headline = "harmonic"
    metrics = RECALLS

    def load(self, data_dir: Path) -> list[Item]:
        (path,) = self.files(data_dir)
        rows = records.read_records(path)
        return [
            item for mode in self.modes for n, row in enumerate(rows) for item in self._items(mode, n, row, data_dir)
        ]

    def _items(self, mode: str, number: int, row: Record, data_dir: Path) -> list[Item]:
        if (mode == "ccs") != ("ccs_description" in row):
            return []
        image = str(row.need("image_id"))
        before = ""
        if mode in ("iac", "icc"):
            before = records.record(row.need("context"), row.where).need_text(mode) + INSTRUCTION
        if mode == "ccs":
            path = records.find_image(data_dir, f"{image}.png", "phd/CCS_images", "CCS_images")
        else:
            path = _coco(data_dir, image.zfill(12))
        meta = {"task": row.need_text("task"), "mode": mode}
        items = []
        for label in ("yes", "no"):
            prompt = before + row.need_text(f"{label}_question")
            items.append(Item(f"{mode}/{number}/{label}", prompt, (path,), {**meta, "label": label}))
        return items

    def image_files(self, data_dir: Path, limit: int | None = None) -> list[Remote]:
        """Return COCO's images one by one, and the generated ones from their archive."""
        remotes = super().image_files(data_dir, limit)
        coco = [remote for remote in remotes if remote.urls]
        generated = tuple(Path(remote.path).name for remote in remotes if not remote.urls)
        return [*coco, *([Remote("phd/CCS_images/CCS_images.zip", (_CCS,), members=generated)] if generated else [])]

    def image_urls(self, image: Path, item: Item) -> tuple[str, ...]:
        if item.meta["mode"] == "ccs":
            return ()
        return tuple(url for s in ("train2014", "val2014") for url in coco_image(f"COCO_{s}_{image.stem}.jpg"))

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        groups: dict[str, list[tuple[str, str, str]]] = {}  # mode or mode/task -> its rows
        for item in items:
            for name in (item.meta["mode"], f"{item.meta['mode']}/{item.meta['task']}"):
                groups.setdefault(name, []).append((item.id, answers[item.id], item.meta["label"]))
        names = [name for mode in MODES for name in sorted(groups) if name.partition("/")[0] == mode]
        parts = {name: score_recalls(groups[name], self.parser) for name in names}
        modes = [part for name, part in parts.items() if name in MODES]
        metrics = {m.name: sum(part.metrics[m.name] for part in modes) / len(modes) for m in RECALLS}
        per_item: dict[str, PerUnit] = {}
        counts: dict[str, float] = {}
        for name, part in parts.items():
            metrics |= {f"{name}/{metric}": value for metric, value in part.metrics.items()}
            per_item |= {f"{name}/{metric}": units for metric, units in part.per_item.items()}
            if name in MODES:
                counts |= {f"{name}/{kind}": value for kind, value in part.counts.items()}
        return Scores(metrics, per_item, counts)


def _coco(data_dir: Path, number: str) -> Path:
    """Return the path of an image of COCO 2014, in train2014 or val2014; data.json does not have the split."""
    for split in ("train2014", "val2014"):
        if (path := data_dir / split / f"COCO_{split}_{number}.jpg").exists():
            return path
    return data_dir / "coco2014" / f"{number}.jpg"
