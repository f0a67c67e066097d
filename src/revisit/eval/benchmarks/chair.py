"""CHAIR: which COCO objects a caption mentions, and which of them are not in the image.

The rule is the one current papers report (OPERA, RITUAL, ReVisiT, lmms-eval): NLTK tokens, tags and lemmas. The
original script singularizes every token with pattern.en instead; docs/research/scorers.md lists what that changes, and its
numbers are not computed here. Data: COCO val2014 images, and captions_val2014.json plus instances_val2014.json (or a
map of image ids to category names) as ground truth.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks import language
from revisit.eval.benchmarks.base import Benchmark, Item, Metric, PerUnit, Scores, coco_image
from revisit.eval.benchmarks.io import packaged
from revisit.eval.benchmarks.io.download import Remote
from revisit.io import records
from revisit.io.records import AnswerRow
from revisit.words import PAIRS, WORDS

PROMPT = "Please describe this image in detail."
_POS = {"J": "a", "V": "v", "N": "n", "R": "r"}

ImageId = int | str


@dataclass(frozen=True)
class Parse:
    """A parsed caption.

    `merged`: lemmas, with known word pairs merged into one word; its length is the caption's length. `words`: those that
    name a COCO object, `nodes`: their categories.
    """

    tokens: tuple[str, ...]
    merged: tuple[str, ...]
    words: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class CaptionScore:
    """One caption against its image's objects; the ratios are 0 where their denominator is 0, as published."""

    parse: Parse
    ground_truth: frozenset[str]

    @property
    def hallucinated(self) -> list[tuple[str, str]]:
        """(word, category) of every mention that is not in the image, repeats included."""
        pairs = zip(self.parse.words, self.parse.nodes, strict=True)
        return [(word, node) for word, node in pairs if node not in self.ground_truth]

    @property
    def named(self) -> set[str]:
        """The distinct categories that are mentioned."""
        return set(self.parse.nodes)

    @property
    def recalled(self) -> set[str]:
        """The distinct categories that are both mentioned and in the image."""
        return self.named & self.ground_truth

    @property
    def precision(self) -> float:
        """Correct mentions / mentions, repeats counted; 0 without mentions."""
        mentions = len(self.parse.nodes)
        return (mentions - len(self.hallucinated)) / mentions if mentions else 0.0

    @property
    def recall(self) -> float:
        """Distinct recalled categories / categories in the image."""
        return len(self.recalled) / len(self.ground_truth) if self.ground_truth else 0.0

    @property
    def repeats(self) -> bool:
        """Whether some object is named three times or more."""
        return max(Counter(self.parse.nodes).values(), default=0) >= 3

    @property
    def f1(self) -> float:
        """The ReVisiT paper's per-caption F1."""
        p, r = self.precision, self.recall
        return 2 * p * r / (p + r) if p + r else 0.0


def lemmas(caption: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens and lemmas of the lower-cased caption; captions of generated scenes do not need NLTK's data."""
    if language.missing_packages() and (found := language.parse_scene_caption(caption.lower())):
        return found
    pairs = language.tagged(caption.lower())
    roots = (language.lemma(token, _POS.get(tag[:1], "n")) for token, tag in pairs)
    return tuple(token for token, _ in pairs), tuple(roots)


def merge_pairs(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Merge known pairs of words, left to right; return the words and the index at which each starts."""
    merged: list[str] = []
    starts: list[int] = []
    i = 0
    while i < len(words):
        one = PAIRS.get((words[i], words[i + 1])) if i + 1 < len(words) else None
        merged.append(one or words[i])
        starts.append(i)
        i += 2 if one else 1
    return tuple(merged), tuple(starts)


def names_object(word: str, merged: Sequence[str]) -> bool:
    """Return whether a word of a caption names a COCO object; the seat of a toilet is not a chair."""
    return word in WORDS and not (word == "seat" and "toilet" in merged)


def parse_caption(caption: str) -> Parse:
    """Return the COCO objects that a caption mentions, in order and with repeats."""
    tokens, roots = lemmas(caption)
    merged, _ = merge_pairs(roots)
    words = tuple(word for word in merged if names_object(word, merged))
    return Parse(tokens, merged, words, tuple(WORDS[word] for word in words))


def score_caption(caption: str, ground_truth: Iterable[str]) -> CaptionScore:
    """Score a caption against the categories in its image."""
    return CaptionScore(parse_caption(caption), frozenset(ground_truth))


def score_captions(captions: Iterable[tuple[str, str, Iterable[str]]]) -> Scores:
    """Compute the metrics over (unit name, caption, ground-truth categories) triples."""
    units: dict[str, CaptionScore] = {unit: score_caption(text, truth) for unit, text, truth in captions}
    per_item: dict[str, PerUnit] = {
        "CHAIRs": {u: (float(bool(s.hallucinated)), 1.0) for u, s in units.items()},
        "CHAIRi": {u: (float(len(s.hallucinated)), float(len(s.parse.nodes))) for u, s in units.items()},
        "Recall": {u: (float(len(s.recalled)), float(len(s.ground_truth))) for u, s in units.items()},
        "F1": {u: (s.f1, 1.0) for u, s in units.items()},
        "Len": {u: (0.01 * len(s.parse.merged), 1.0) for u, s in units.items()},
        "Rep": {u: (float(s.repeats), 1.0) for u, s in units.items()},
        "DistinctP": {u: (len(s.recalled), len(s.named)) for u, s in units.items()},
        "DistinctF1": {u: (2 * len(s.recalled), len(s.named) + len(s.ground_truth)) for u, s in units.items()},
    }
    counts = {
        "captions": len(units),
        "hallucinated_captions": sum(bool(s.hallucinated) for s in units.values()),
        "object_mentions": sum(len(s.parse.nodes) for s in units.values()),
        "hallucinated_mentions": sum(len(s.hallucinated) for s in units.values()),
        "recalled_objects": sum(len(s.recalled) for s in units.values()),
        "ground_truth_objects": sum(len(s.ground_truth) for s in units.values()),
    }
    undefined = "CHAIRi is undefined: no caption mentions any object."
    scores = Scores.of(per_item, counts, () if counts["object_mentions"] else (undefined,))
    if units:  # by the official formula, whose rounding decides the last printed digit
        scores.metrics["Len"] = 0.01 * sum(len(s.parse.merged) for s in units.values()) / len(units)
    return scores


# ---------------------------------------------------------------------------------------------- ground truth


def image_key(value: object) -> ImageId:
    """Return an image id as a number: 139, "139", "000000000139.jpg" and "COCO_val2014_000000000139.jpg" are one image."""
    if isinstance(value, int):
        return value
    match = re.search(r"(\d+)(?:\.\w+)?$", str(value))
    return int(match.group(1)) if match else str(value)


def build_ground_truth(
    instances: Iterable[tuple[ImageId, str]], captions: Iterable[tuple[ImageId, str]]
) -> dict[ImageId, set[str]]:
    """Return for each image the categories of its instances and those its reference captions mention."""
    truth: dict[ImageId, set[str]] = {}
    for image, name in instances:
        truth.setdefault(image, set()).add(WORDS.get(name, name))
    for image, caption in captions:
        truth.setdefault(image, set()).update(parse_caption(caption).nodes)
    return truth


def read_ground_truth(paths: Sequence[Path], ids: Iterable[ImageId]) -> dict[ImageId, set[str]]:
    """Read ground truth from a map of image ids to category names, or from COCO's instances and captions files.

    COCO captions are parsed for the images `ids` only, because parsing all of val2014 takes minutes.
    """
    if len(paths) == 1:
        return _read_map(paths[0])
    keep = set(ids)
    instances, captions = (_coco(path, kind, keep) for path, kind in zip(paths, ("instances", "captions"), strict=True))
    return build_ground_truth(instances, captions)


def _coco(path: Path, kind: str, keep: set[ImageId] | None = None) -> list[tuple[ImageId, str]]:
    """Return (image id, file name) of the images, or (image id, category name or caption) of the annotations of those to keep."""
    data = records.read_json(path)
    try:
        if kind == "images":
            return [(image["id"], str(image["file_name"])) for image in data["images"]]
        names = {c["id"]: c["name"] for c in data.get("categories", [])}
        rows = [a for a in data["annotations"] if keep is None or a["image_id"] in keep]
        return [(a["image_id"], str(names[a["category_id"]] if kind == "instances" else a["caption"])) for a in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise RevisitError(f"{path} is not a COCO {kind} file ({type(error).__name__}: {error}).") from error


def _read_map(path: Path) -> dict[ImageId, set[str]]:
    data = records.read_json(path)
    if not isinstance(data, dict) or not all(isinstance(names, list) for names in data.values()):
        raise RevisitError(f"{path} must be a JSON object that maps each image id to a list of category names.")
    return {image_key(image): set(names) for image, names in data.items()}


# ------------------------------------------------------------------------------------------------- benchmark


@functools.cache
def samples() -> dict[str, list[ImageId]]:
    """Return the lists of val2014 image ids that ship with the package, by name."""
    stored = json.loads(packaged("coco_val2014_samples.json"))
    return {name: [int(i) for i in sample["ids"]] for name, sample in stored.items()}


class Chair(Benchmark):
    """CHAIR: objects that a caption mentions and the image does not contain.

    Args:
        ids: The images to use: "auto" (the list seed42-500 if the annotations contain it, else all), "all", the name of a list
            that ships with the package, or a file with one id per line or a JSON list.
    """

    ids: str = "auto"

    name = "chair"
    needs_nltk = True
    max_new_tokens = 512
    headline = "CHAIRs"
    metrics = (
        Metric("CHAIRs", "lower", 100, 1),
        Metric("CHAIRi", "lower", 100, 1),
        Metric("Recall", "higher", 100, 1),
        Metric("F1", "higher", 100, 1),
        Metric("Len", None, 100, 1),
        Metric("Rep", "lower", 100, 1),
        Metric("DistinctP", "higher", 100, 1),
        Metric("DistinctF1", "higher", 100, 1),
    )

    @property
    def version(self) -> str:
        return "chair-scenes-1" if language.missing_packages() else "chair-nltk-1"

    def files(self, data_dir: Path) -> list[Path]:
        truth = records.folder(data_dir, "chair", "ground_truth.json") / "ground_truth.json"
        if truth.exists():
            return [truth]
        names = self.downloads[0].members
        folder = records.folder(data_dir, "annotations", *names)
        return [self.require(folder / name) for name in names]

    def load(self, data_dir: Path) -> list[Item]:
        paths = self.files(data_dir)
        names = _image_names(paths)
        ids = self._choose(list(names))
        truth = read_ground_truth(paths, ids)
        items = []
        for i in ids:
            image = records.find_image(data_dir, names[i], "val2014", "images")
            items.append(Item(str(i), PROMPT, (image,), {"ground_truth": sorted(truth.get(i, ()))}))
        return items

    def image_files(self, data_dir: Path, limit: int | None = None) -> list[Remote]:
        known = _image_names(self.files(data_dir))
        names = [known[i] for i in self._choose(list(known))[:limit]]
        return [Remote(f"val2014/{name}", coco_image(name)) for name in names]

    def _choose(self, known: list[ImageId]) -> list[ImageId]:
        if self.ids == "all":
            return known
        if self.ids == "auto":
            listed = samples()["seed42-500"]
            return listed if set(listed) <= set(known) else known
        if self.ids in samples():
            ids = samples()[self.ids]
        elif Path(self.ids).exists():
            ids = read_ids(Path(self.ids))
        else:
            raise unknown("list of image ids", self.ids, [*samples(), "auto", "all", "or an existing file"])
        if absent := [i for i in ids if i not in set(known)]:
            raise RevisitError(f"{len(absent)} images of {self.ids!r} are not in the annotations (first: {absent[0]}).")
        return ids

    def answer_id(self, answer: AnswerRow) -> str | None:
        """Return the image's id, from its number or its file name."""
        name = answer.key(("image_id", "image", "id", "question_id"))
        return None if name is None else str(image_key(name))

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        scores = score_captions((item.id, answers[item.id], item.meta["ground_truth"]) for item in items)
        return replace(scores, notes=(*scores.notes, language.version()))


def _image_names(paths: list[Path]) -> dict[ImageId, str]:
    """Return image id -> file name, sorted by id."""
    if len(paths) > 1:  # COCO's files
        return dict(sorted(_coco(paths[0], "images")))
    keys = sorted(_read_map(paths[0]), key=lambda key: (isinstance(key, str), key))
    return {key: f"COCO_val2014_{key:012d}.jpg" if isinstance(key, int) else str(key) for key in keys}


def read_ids(path: Path) -> list[ImageId]:
    """Read image ids from a JSON list or from a text file with one id (or file name) per line, in order."""
    text = records.read_text(path)
    values = records.read_json(path) if text.lstrip().startswith("[") else text.split()
    return [image_key(value) for value in values]
