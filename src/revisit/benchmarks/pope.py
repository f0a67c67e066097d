"""POPE: "Is there a ... in the image?", half yes and half no, in nine settings; RePOPE: the same with corrected labels.

The published parsers disagree on one answer in ten, so the parser is part of every number's name. Data: the official
question files (AoiDragon/POPE `output/`, or VCD's copies) and the COCO val2014 and GQA pictures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from revisit.benchmarks.base import (
    COCO_LICENSE,
    Benchmark,
    HubDataset,
    Item,
    Metric,
    Scores,
    check_answers,
    check_choice,
    coco_picture,
    lmms,
    ratio,
    require,
)
from revisit.benchmarks.io import files
from revisit.benchmarks.io.answers import (
    Answer,
    aligned,
    by_id,
    check_not_gold,
    check_pictures,
    check_questions,
    repeats_question,
)
from revisit.benchmarks.io.download import Remote
from revisit.benchmarks.io.drafts import Draft
from revisit.benchmarks.io.files import Record
from revisit.benchmarks.registry import register
from revisit.benchmarks.vqav2 import strip_punctuation
from revisit.errors import RevisitError

SOURCES = ("coco", "aokvqa", "gqa")
KINDS = ("random", "popular", "adversarial")
POPE_SOURCE = "https://github.com/AoiDragon/POPE (output/coco and output/seem), or `revisit data get pope DIR`"
REPOPE_SOURCE = "https://github.com/YanNeu/RePOPE (annotations)"
# The published files at one commit each.
_POPE_FILES = "https://raw.githubusercontent.com/AoiDragon/POPE/08d957b917e5a378a2f99d35b6293c536a66298b/output"
_POPE_SHA256 = {
    ("coco", "random"): "ac25245170b975a5bdf9080b23fd431dfe6be458bc038259c1f4f09a6bef7994",
    ("coco", "popular"): "72c1a8ad45d0c13514f5f22598261df41d3b533854d29682e924db50ed8aa753",
    ("coco", "adversarial"): "420b3407db1fa9f1187a805dca41cb7b97fd91504e6c2179706188c107fb8ef8",
    ("aokvqa", "random"): "f06eecde6d6ef4a00b95a7bbb510490708a09a6a67d952b59b8bdd33ac2c7200",
    ("aokvqa", "popular"): "2ae5bedee3450cda52f9b033942c7b04a3917a86a110e859a66c1e41934c6ffd",
    ("aokvqa", "adversarial"): "2ddd3bdfa0df7a77a2cb1765ed06ac5ed190b5a093aa405b96986e862e8cdac1",
    ("gqa", "random"): "6ce488eade3770185034939fabfe742fa32ed369011c8d9c3ac77bc0c85abd94",
    ("gqa", "popular"): "dd03f06a458dd216e83233160fbf6628af9c63c84b11e99599f4fc0304b3361d",
    ("gqa", "adversarial"): "74e01b41d8308e2392e3b8d961167496ff3901c01100265d931a7a392f138a7a",
}
_REPOPE_FILES = "https://raw.githubusercontent.com/YanNeu/RePOPE/bcf22e5690d587cce34e1728af3efdcfaf747d29/annotations"
_REPOPE_SHA256 = {
    "random": "f464fcaf60b24ce2f280cf33f122e000dbdd35c8e88f77c4141c9c2cba864611",
    "popular": "57832b055bae5fd6176278a4f104c98ddd84811f7d26dfcb93d481f6c9da09a5",
    "adversarial": "8c346dbb060bf422ff92e769fa68e5ab3e8a777cb28a26e973387441e05c9ccf",
}
# GQA's pictures are those of Visual Genome, which keeps them in two folders.
_VISUAL_GENOME = ("https://cs.stanford.edu/people/rak248/VG_100K", "https://cs.stanford.edu/people/rak248/VG_100K_2")
SUFFIXES = {"none": "", "one-word": " Please answer this question with one word."}

# --------------------------------------------------------------------------------------------------- parsers
# A parser gives "yes", "no", or any other text for an answer it does not understand.


def parse_official(text: str, label: str = "") -> str:
    """POPE's evaluate.py: first sentence only, commas dropped; "no" if No, no or not is a word of it, else "yes"."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "no", "not"} & set(words) else "yes"


def parse_opera(text: str, label: str = "") -> str:
    """OPERA's recorder: all sentences, full stops and commas dropped; NO and words in n't count as "no" too."""
    words = text.replace(".", "").replace(",", "").split(" ")
    negative = {"No", "no", "not", "NO"} & set(words) or any(word.endswith("n't") for word in words)
    return "no" if negative else "yes"


def parse_vcd(text: str, label: str = "") -> str:
    """VCD's rule, which looks at the label: the answer is right if it contains the label anywhere, "know" included."""
    wanted = label.lower().strip()
    if wanted in text.lower().strip():
        return wanted
    return "no" if wanted == "yes" else "yes"


def parse_harness(text: str, label: str = "") -> str:
    """lmms-eval: the whole answer, lower-cased and stripped; anything but exactly yes or no is wrong."""
    return text.lower().strip()


def parse_vlmevalkit(text: str, label: str = "") -> str:
    """VLMEvalKit: yes or no if exactly one of them is a word, else unknown."""
    words = strip_punctuation(text.lower(), _LONE_PERIOD).split()
    if ("yes" in words) == ("no" in words):
        return "unknown"
    return "yes" if "yes" in words else "no"


def parse_repope(text: str, label: str = "") -> str:
    """RePOPE: yes if "yes" is anywhere in the answer, else no if "no" is, else no prediction at all."""
    lower = text.lower()
    return "yes" if "yes" in lower else "no" if "no" in lower else "unknown"


_LONE_PERIOD = re.compile(r"(?<!\d)\.(?!\d)")

PARSERS: dict[str, Callable[[str, str], str]] = {
    "official": parse_official,
    "vcd": parse_vcd,
    "opera": parse_opera,
    "harness": parse_harness,
    "vlmevalkit": parse_vlmevalkit,
    "repope": parse_repope,
}

# --------------------------------------------------------------------------------------------------- metrics

# (label, prediction) -> which of TP, FP, TN, FN, "wrong" (counts as an error only) or "left out" it is
_CELLS = {("yes", "yes"): "TP", ("no", "yes"): "FP", ("no", "no"): "TN", ("yes", "no"): "FN"}


def cell(label: str, prediction: str, parser: str = "official") -> str:
    """Where an answer is counted; the parsers differ in what an answer that is neither yes nor no does."""
    if (label, prediction) in _CELLS:
        return _CELLS[label, prediction]
    if parser == "repope":
        return "left out"
    if parser == "vlmevalkit" and label == "yes":
        return "FN"  # not yes, so missed: recall counts it
    return "wrong"


def score_cells(cells: Mapping[str, str], yes_labels: Mapping[str, bool] | None = None) -> Scores:
    """The five metrics from each unit's cell; `yes_labels` makes the yes-ratio one of labels, as lmms-eval has it."""
    tp, fp, tn, fn = ({u: float(c == kind) for u, c in cells.items()} for kind in ("TP", "FP", "TN", "FN"))
    counted = {u: float(c != "left out") for u, c in cells.items()}
    said_yes = {u: tp[u] + fp[u] for u in cells} if yes_labels is None else {u: float(yes_labels[u]) for u in cells}
    per_item = {
        "accuracy": {u: (tp[u] + tn[u], counted[u]) for u in cells},
        "precision": {u: (tp[u], tp[u] + fp[u]) for u in cells},
        "recall": {u: (tp[u], tp[u] + fn[u]) for u in cells},
        "F1": {u: (2 * tp[u], 2 * tp[u] + fp[u] + fn[u]) for u in cells},
        "yes_ratio": {u: (said_yes[u], counted[u]) for u in cells},
    }
    counts = {kind: float(sum(c == kind for c in cells.values())) for kind in ("TP", "FP", "TN", "FN")}
    counts["other"] = len(cells) - sum(counts.values())
    metrics = {name: ratio(units.values()) for name, units in per_item.items()}
    p, r = metrics["precision"], metrics["recall"]
    metrics["F1"] = 2 * p * r / (p + r) if p + r else math.nan
    return Scores(metrics, per_item, counts)


def score_answers(rows: Iterable[tuple[str, str, str]], parser: str = "official") -> Scores:
    """The metrics over (unit, answer, label) rows. Precision and F1 without any yes answer are undefined (NaN)."""
    check_choice("parser", parser, PARSERS)
    parse = PARSERS[parser]
    cells, labels = {}, {}
    for unit, answer, label in rows:
        label = label.lower().strip()
        if label not in ("yes", "no"):
            raise RevisitError(f"Item {unit}: the label must be yes or no, not {label!r}.")
        cells[unit] = cell(label, parse(answer, label), parser)
        labels[unit] = label == "yes"
    scores = score_cells(cells, labels if parser == "harness" else None)
    if parser not in ("harness", "vlmevalkit"):
        return scores
    # the two harnesses divide 0 by 0 to 0
    metrics = {name: 0.0 if value != value else value for name, value in scores.metrics.items()}
    return Scores(metrics, scores.per_item, scores.counts)


def score_settings(rows: Iterable[tuple[str, str, str, str]], parser: str = "official") -> Scores:
    """Per setting, and averaged over settings metric by metric, from (unit, answer, label, setting) rows.

    VLMEvalKit pools the rows of all settings instead.
    """
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for unit, answer, label, setting in rows:
        groups.setdefault(setting, []).append((unit, answer, label))
    parts = {setting: score_answers(group, parser) for setting, group in groups.items()}
    if len(parts) == 1:
        return next(iter(parts.values()))
    metrics = {
        name: sum(part.metrics[name] for part in parts.values()) / len(parts)
        for name in next(iter(parts.values())).metrics
    }
    per_item = {}
    if parser == "vlmevalkit":
        pooled = score_answers((row for group in groups.values() for row in group), parser)
        metrics, per_item = dict(pooled.metrics), dict(pooled.per_item)
    # Accuracy and yes-ratio are means within a setting, so their mean over settings is a weighted sum over items.
    for name in () if parser == "vlmevalkit" else ("accuracy", "yes_ratio"):
        per_item[name] = {
            unit: (n / total, d / total)
            for part in parts.values()
            for total in [sum(d for _, d in part.per_item[name].values()) * len(parts)]
            for unit, (n, d) in part.per_item[name].items()
        }
    for setting, part in parts.items():
        metrics |= {f"{setting}/{name}": value for name, value in part.metrics.items()}
        per_item |= {f"{setting}/{name}": units for name, units in part.per_item.items()}
    counts = {f"{setting}/{k}": v for setting, part in parts.items() for k, v in part.counts.items()}
    return Scores(metrics, per_item, counts)


# ------------------------------------------------------------------------------------------------ benchmarks


def _question_file(source: str, kind: str) -> Remote:
    name = f"coco_pope_{kind}.json" if source == "coco" else f"{source}_pope_seem_{kind}.json"
    place = f"coco/{name}" if source == "coco" else f"seem/{source}/{name}"
    return Remote(f"pope/{name}", (f"{_POPE_FILES}/{place}",), _POPE_SHA256[source, kind], 500_000)


@register
@dataclass(frozen=True)
class Pope(Benchmark):
    """`settings`: which of the nine (all whose files are in the folder if empty), such as "coco_random,gqa_popular".

    `suffix`: "none" asks the question alone (OPERA, RITUAL), "one-word" adds VCD's request for a single word.
    """

    settings: tuple[str, ...] = ()
    parser: str = "official"
    suffix: str = "none"

    name: ClassVar[str] = "pope"
    title: ClassVar[str] = "POPE"
    parts: ClassVar[str] = "every source and setting"
    max_new_tokens: ClassVar[int] = 64
    headline: ClassVar[str] = "F1"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "higher", 100, 2),
        Metric("precision", "higher", 100, 2),
        Metric("recall", "higher", 100, 2),
        Metric("F1", "higher", 100, 2),
        Metric("yes_ratio", None, 100, 2),
    )
    all_settings: ClassVar[tuple[str, ...]] = tuple(f"{source}_{kind}" for source in SOURCES for kind in KINDS)
    source: ClassVar[str] = POPE_SOURCE
    hub: ClassVar[HubDataset | None] = HubDataset(
        lmms("POPE"), ("test",), ("question_id", "question", "answer", "image_source", "image", "category")
    )

    license: ClassVar[str] = f"questions MIT; COCO: {COCO_LICENSE}; GQA's pictures (Visual Genome) CC BY 4.0"
    downloads: ClassVar[tuple[Remote, ...]] = tuple(_question_file(*key) for key in _POPE_SHA256)

    def __post_init__(self) -> None:
        check_choice("parser", self.parser, PARSERS)
        check_choice("suffix", self.suffix, SUFFIXES)
        for setting in self.settings:
            check_choice("setting", setting, self.all_settings)

    @property
    def version(self) -> str:
        return f"{self.name}-{self.parser}-1"

    def files(self, data_dir: Path) -> list[Path]:
        return [path for _, path in self._settings(data_dir)]

    def _file(self, folder: Path, setting: str) -> Path:
        source, kind = setting.split("_")
        names = (f"{source}_pope_{kind}.json", f"{source}_pope_seem_{kind}.json")
        return next((folder / name for name in names if (folder / name).exists()), folder / names[source != "coco"])

    def _settings(self, data_dir: Path) -> list[tuple[str, Path]]:
        folder = files.folder(data_dir, self.name, *(self._file(data_dir, s).name for s in self.all_settings))
        if self.settings:
            chosen = [(s, self._file(folder, s)) for s in self.settings]
            return [(s, require(path, f"The file with {self.name}'s questions {s}", self.source)) for s, path in chosen]
        found = [(s, self._file(folder, s)) for s in self.all_settings]
        present = [(s, path) for s, path in found if path.exists()]
        if not present:
            require(found[0][1], f"The file with {self.name}'s questions", self.source)
        return present

    def load(self, data_dir: Path) -> list[Item]:
        return [item for setting, path in self._settings(data_dir) for item in self._items(path, setting, data_dir)]

    def _items(self, path: Path, setting: str, data_dir: Path) -> list[Item]:
        places = ("gqa", "gqa/images", "images") if setting.startswith("gqa") else ("val2014", "images")
        items = []
        images: dict[str, Path] = {}  # six questions share a picture
        for row in files.read_records(path):
            file = row.need_text("image")
            image = images.get(file) or images.setdefault(file, files.find_image(data_dir, file, *places))
            meta = {"label": row.need_text("label"), "setting": setting}
            name = f"{setting}/{row.need('question_id')}"
            items.append(Item(name, row.need_text("text") + SUFFIXES[self.suffix], (image,), meta))
        return items

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """One question file per category, which is a setting; `image_source` is the COCO file name without its ending."""
        for row in rows:
            kind, number = row.need_choice("category", KINDS), row.need_int("question_id")
            out.once((kind, number), row.where)
            name = str(row["image_source"]).removesuffix(".jpg")
            image = Path(out.picture(f"val2014/{name}", row["image"], row.where)).name
            label = row.need_choice("answer", ("yes", "no"))
            entry = {"question_id": number, "image": image, "text": row["question"], "label": label}
            out.add(f"pope/coco_pope_{kind}.json", entry)

    def picture_urls(self, image: Path) -> tuple[str, ...]:
        if image.parent.name == "gqa":
            return tuple(f"{place}/{image.name}" for place in _VISUAL_GENOME)
        return coco_picture(image.name)

    def match(self, answers: list[Answer], truth: list[Path]) -> tuple[list[Item], dict[str, str]]:
        if not truth:
            if self.settings:
                raise RevisitError("settings=... needs the question files (--questions) or the data folder (--data).")
            return _carried(answers)
        places = [place for path in truth for place in self._question_files(path)]
        items = [item for setting, path in places for item in self._items(path, setting, path.parent)]
        items = [item for item in items if not self.settings or item.meta["setting"] in self.settings]
        if not items:
            raise RevisitError(
                f"{', '.join(map(str, truth))}: there are no questions, or none of the settings asked for."
            )
        found = _by_setting(items, answers, told=not any(path.is_dir() for path in truth))
        check_questions({item.id: item.prompt.removesuffix(SUFFIXES[self.suffix]) for item in items}, found)
        if self.name == "repope":  # answers to all of POPE: those to ambiguous questions do not count
            known = {item.id for item in items}
            found = {key: answer for key, answer in found.items() if key in known}
        else:
            _check_labels(items, found)
        check_pictures({item.id: item.images[0].name for item in items}, found)
        check_not_gold({item.id: item.meta["label"] for item in items}, found)
        return items, {key: answer.text for key, answer in found.items()}

    def _question_files(self, path: Path) -> list[tuple[str, Path]]:
        """(setting, file) of a question file, or of every one in a folder."""
        return self._settings(path) if path.is_dir() else [(_setting(path), path)]

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        check_answers(items, answers)
        rows = ((item.id, answers[item.id], item.meta["label"], item.meta["setting"]) for item in items)
        return score_settings(rows, self.parser)


def _setting(path: Path) -> str:
    """The setting that a question file's name tells, such as coco_random; else the name itself."""
    found = [part for part in re.split(r"[_.]", path.name) if part in SOURCES + KINDS]
    return "_".join(found) if len(found) == 2 else path.name.split(".")[0]


def _by_setting(items: list[Item], answers: list[Answer], told: bool) -> dict[str, Answer]:
    """Answers by item id, which begins with the setting: as the ids say, as the files are called, or as the order shows.

    `told`: whether the user gave the question files one by one, so that their order is known to be that of the answers.
    """
    if any("/" in str(answer.record.get("id", "")) for answer in answers):
        return by_id(answers, ("id", "question_id"))
    settings = list(dict.fromkeys(item.meta["setting"] for item in items))
    parts = {setting: [item for item in items if item.meta["setting"] == setting] for setting in settings}
    fields = ("question_id", "id")
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(_setting(answer.file) if answer.file else "", []).append(answer)
    if len(settings) == 1:
        groups = {settings[0]: answers}
    elif not set(groups) <= set(settings):
        if len(answers) != len(items):
            raise RevisitError(
                f"The answers' question ids do not say which of the settings {', '.join(settings)} they belong to, and there are "
                f"{len(answers)} answers to {len(items)} questions; name the answer files by their settings, or score one at a time."
            )
        if not told and not all(repeats_question(answer) for answer in answers):
            raise RevisitError(
                f"Nothing says in which order the answers to the settings {', '.join(settings)} stand in one file: give --questions once "
                "for each question file in that order, or name the answer files by their settings."
            )
        left = iter(answers)  # all settings one after the other, in the order of the question files
        groups = {setting: [next(left) for _ in part] for setting, part in parts.items()}
    found: dict[str, Answer] = {}
    for setting, group in groups.items():
        ids = [item.id.partition("/")[2] for item in parts[setting]]
        found |= {f"{setting}/{key}": answer for key, answer in aligned(ids, group, fields).items()}
    return found


def _check_labels(items: list[Item], found: Mapping[str, Answer]) -> None:
    """Raises if an answer brings another label than that of its question."""
    labels = {item.id: item.meta["label"].strip().lower() for item in items}
    for key, answer in found.items():
        said = answer.record.get("label") if answer.text_field != "label" else None
        if key in labels and isinstance(said, str) and said.strip().lower() not in ("", labels[key]):
            raise RevisitError(
                f"{answer.where} has the label {said!r}, but item {key!r} of the question file has {labels[key]!r}: the rows are "
                "shuffled, or of another file (or their label is not the gold answer: leave it out)."
            )


def _carried(answers: list[Answer]) -> tuple[list[Item], dict[str, str]]:
    """Items from answers that bring their labels along: lmms-eval samples, VLMEvalKit tables, merged files."""
    items, texts = [], {}
    for number, answer in enumerate(answers, 1):
        record = answer.record
        gold = ("label", "target") if answer.text_field == "answer" else ("label", "target", "answer")
        label = next((record[name] for name in gold if record.get(name)), None)
        if label is None:
            raise RevisitError(f"{answer.where} carries no label; give the question file with --questions.")
        # VLMEvalKit lists a question that belongs to several settings once.
        for setting in str(record.get("category") or "all").split(","):
            name = f"{setting}/{answer.key(('index', 'doc_id', 'question_id', 'id')) or number}"
            if name in texts:
                raise RevisitError(f"{answer.where} answers {name!r} a second time.")
            items.append(Item(name, "", (), {"label": str(label), "setting": setting}))
            texts[name] = answer.text
    return items, texts


@register
@dataclass(frozen=True)
class RePope(Pope):
    """POPE's three COCO settings with corrected labels, ambiguous questions removed; RePOPE's own parser by default."""

    parser: str = "repope"

    name: ClassVar[str] = "repope"
    title: ClassVar[str] = "RePOPE"
    parts: ClassVar[str] = "every setting"
    all_settings: ClassVar[tuple[str, ...]] = tuple(f"coco_{kind}" for kind in KINDS)
    source: ClassVar[str] = REPOPE_SOURCE
    hub: ClassVar[HubDataset | None] = None
    license: ClassVar[str] = f"RePOPE: none stated by its authors; {COCO_LICENSE}"
    downloads: ClassVar[tuple[Remote, ...]] = tuple(
        Remote(f"repope/coco_repope_{kind}.json", (f"{_REPOPE_FILES}/coco_repope_{kind}.json",), sha256, 340_000)
        for kind, sha256 in _REPOPE_SHA256.items()
    )

    def _file(self, folder: Path, setting: str) -> Path:
        return folder / f"coco_repope_{setting.split('_')[1]}.json"
