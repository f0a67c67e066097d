"""AMBER: captions checked against annotated objects (CHAIR, Cover, Hal, Cog), and yes/no questions.

The rules are those of AMBER's inference.py. In its generative part two words name the same object if the similarity of their
vectors in spaCy's en_core_web_lg is above 0.8. Without spaCy, `similarity=exact` requires equal words, under its own version
name. Data: AMBER's `data/` folder and images (junyangwang0410/AMBER).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import Literal

from revisit.errors import RevisitError
from revisit.eval.benchmarks import language
from revisit.eval.benchmarks.base import Benchmark, Item, Metric, PerUnit, Scores, ratio
from revisit.eval.benchmarks.io.download import Remote
from revisit.eval.benchmarks.yes_no import parse_vlmevalkit
from revisit.io import records
from revisit.io.records import Fields

# The published files at one commit, and the archive of images that its README links to.
FILES = ("annotations.json", "relation.json", "safe_words.txt", "query/query_all.json")
_IMAGES = "https://drive.usercontent.google.com/download?id=1MaCHgtupcZUjf007anNl4_MV0o4DjXvl&export=download&confirm=t"
THRESHOLD = 0.8
# inference.py starts every denominator at this value; without it, printed digits of small runs would differ.
EPSILON = 0.001
# type in annotations.json -> dimension; anything else is a relation
KINDS = {
    "discriminative-attribute-state": "state",
    "discriminative-attribute-number": "number",
    "discriminative-attribute-action": "action",
    "discriminative-hallucination": "existence",
}
DIMENSIONS = {
    "": ("state", "number", "action", "existence", "relation"),
    "existence/": ("existence",),
    "attribute/": ("state", "number", "action"),
    "state/": ("state",),
    "number/": ("number",),
    "action/": ("action",),
    "relation/": ("relation",),
}

Similar = Callable[[str, str], bool]

# ------------------------------------------------------------------------------------------- generative part


def nouns(text: str) -> list[str]:
    """Return the lemmas of the words tagged as nouns, case kept."""
    return [language.lemma(word, "n") for word, tag in language.tagged(text) if tag.startswith("NN")]


@dataclass(frozen=True)
class Vocabulary:
    """AMBER's relation.json (objects and their synonyms) and safe_words.txt."""

    related: Mapping[str, Sequence[str]]
    safe: frozenset[str]

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """All words that the rule counts."""
        return frozenset(self.related) | {word for words in self.related.values() for word in words}

    def words_for(self, objects: Sequence[str]) -> list[tuple[str, int]]:
        """Return (word, index of its object): first all related words, then the objects themselves."""
        others = [(word, n) for n, name in enumerate(objects) for word in self.related[name]]
        return others + [(name, n) for n, name in enumerate(objects)]


@dataclass(frozen=True)
class DescriptionScore:
    """Counts of one caption: known nouns, those not in the image, covered objects, and pitfalls mentioned."""

    mentions: int
    hallucinated: int
    covered: int
    objects: int
    pitfalls_hit: int
    pitfalls: int


def score_caption(
    caption_nouns: Iterable[str], truth: Sequence[str], hallu: Sequence[str], words: Vocabulary, similar: Similar
) -> DescriptionScore:
    """Count a caption's nouns; `truth` lists the objects in the image, `hallu` absent ones that people would expect."""
    mentioned = [noun for noun in caption_nouns if noun in words.known]
    real, pitfalls = words.words_for(truth), words.words_for(hallu)
    covered: set[int] = set()
    hit: set[int] = set()
    wrong = 0
    for noun in mentioned:
        if noun in words.safe:
            continue
        if (exact := _first(real, noun, eq)) is not None:
            covered.add(exact)
            continue
        # An exact pitfall and the first similar one both count, and may be different objects.
        hit |= {owner for test in (eq, similar) if (owner := _first(pitfalls, noun, test)) is not None}
        near = _first(real, noun, similar)
        if near is None:
            wrong += 1
        else:
            covered.add(near)
    return DescriptionScore(len(mentioned), wrong, len(covered), len(truth), len(hit), len(hallu))


def _first(words: Iterable[tuple[str, int]], noun: str, test: Similar) -> int | None:
    return next((owner for word, owner in words if test(noun, word)), None)


@functools.cache
def spacy_similarity() -> Similar:
    """Return the official test for two words of the same meaning; raise RevisitError if spaCy or its vectors are missing."""
    try:
        import spacy

        nlp = spacy.load("en_core_web_lg")
    except (ImportError, OSError) as error:
        raise RevisitError(
            "AMBER's generative part needs spaCy and en_core_web_lg (pip install spacy; python -m spacy download "
            "en_core_web_lg), or use the variant without it: the option similarity=exact."
        ) from error
    parse = functools.cache(nlp)
    return functools.cache(lambda one, other: bool(parse(one).similarity(parse(other)) > THRESHOLD))


def _padded(units: PerUnit, counters: int = 1) -> PerUnit:
    """Spread the official extra denominator, one for each counter, over the units."""
    return {u: (n, d + counters * EPSILON / len(units)) for u, (n, d) in units.items()}


def score_captions(captions: Mapping[str, DescriptionScore]) -> Scores:
    """Compute CHAIR, Cover, Hal and Cog in percent."""
    per_item = {
        "CHAIR": {u: (100.0 * c.hallucinated, float(c.mentions)) for u, c in captions.items()},
        "Cover": {u: (100.0 * c.covered, float(c.objects)) for u, c in captions.items()},
        "Hal": {u: (100.0 * (c.hallucinated > 0), 1.0) for u, c in captions.items()},
        "Cog": {u: (100.0 * c.pitfalls_hit, float(c.pitfalls)) for u, c in captions.items()},
    }
    per_item = {name: _padded(units) for name, units in per_item.items()}
    scores = Scores.of(per_item, {"captions": len(captions)})
    # The script prints 100 minus the share of clean captions, so the padding works against it.
    scores.metrics["Hal"] = 100 - ratio((100 - n, d) for n, d in per_item["Hal"].values())
    return scores


# --------------------------------------------------------------------------------------- discriminative part


def parse_official(text: str) -> str:
    """Accept exactly Yes or No."""
    return {"Yes": "yes", "No": "no"}.get(text, "other")


def official_f1(precision: float, recall: float, extra: float) -> float:
    """Compute F1 in percent like inference.py: from percentages rounded to one decimal, with an extra denominator."""
    p, r = round(precision, 1) / 100, round(recall, 1) / 100
    return 2 * p * r / (p + r + extra) * 100


def score_answers(rows: Iterable[tuple[str, str, str, str]]) -> Scores:
    """Compute the metrics in percent, "no" being positive, over all and per dimension, from (unit, prediction, label, dimension) rows."""
    rows = list(rows)
    metrics: dict[str, float] = {}
    per_item: dict[str, PerUnit] = {}
    for prefix, kinds in DIMENSIONS.items():
        part = [row for row in rows if row[3] in kinds]
        if not part:
            continue
        units = {
            "accuracy": {u: (100.0 * (answer == label), 1.0) for u, answer, label, _ in part},
            # every question is a unit, whatever its answer, because methods are compared on the same units
            "precision": {
                u: (100.0 * (answer == label == "no"), float(answer == "no")) for u, answer, label, _ in part
            },
            "recall": {u: (100.0 * (answer == label), 1.0) for u, answer, label, _ in part if label == "no"},
        }
        for name, group in units.items():
            per_item[prefix + name] = _padded(group, 3 if prefix == "attribute/" else 1)  # it adds three counters up
            metrics[prefix + name] = ratio(per_item[prefix + name].values()) if group else 0.0
        extra = 0.001 if prefix == "existence/" else 0.0001
        metrics[f"{prefix}F1"] = official_f1(metrics[f"{prefix}precision"], metrics[f"{prefix}recall"], extra)
    return Scores(metrics, per_item, {"questions": float(len(rows))})


# ------------------------------------------------------------------------------------------------- benchmark


class Amber(Benchmark):
    """AMBER: descriptions checked against annotated objects, and yes/no questions.

    Args:
        part: The questions to use.
        similarity: The comparison of words with annotated objects; "spacy" is official.
        parser: The rule that parses yes/no answers: "official" accepts exactly Yes or No, "vlmevalkit" either word in a sentence.
    """

    part: Literal["all", "generative", "discriminative"] = "all"
    similarity: Literal["spacy", "exact"] = "spacy"
    parser: Literal["official", "vlmevalkit"] = "official"

    name = "amber"
    needs_nltk = True
    rule_options = ("part", "similarity", "parser")
    max_new_tokens = 512
    headline = "CHAIR"
    metrics = (
        Metric("CHAIR", "lower", 1, 1),
        Metric("Cover", "higher", 1, 1),
        Metric("Hal", "lower", 1, 1),
        Metric("Cog", "lower", 1, 1),
        *(Metric(name, "higher", 1, 1) for name in ("accuracy", "precision", "recall", "F1", "AMBER")),
    )

    def home(self, data_dir: Path) -> Path:
        return records.folder(data_dir, "amber", "data", "annotations.json")

    def files(self, data_dir: Path) -> list[Path]:
        folder = records.folder(self.home(data_dir), "data", "annotations.json")
        return [self.require(folder / name) for name in FILES]

    def load(self, data_dir: Path) -> list[Item]:
        annotations, _, _, queries = self.files(data_dir)
        notes: dict[str, Fields] = {}  # id -> `meta` of the item
        for row in records.read_records(annotations):
            generative = row.need("type") == "generative"
            if self.part == "all" or (self.part == "generative") == generative:
                kind = "generative" if generative else KINDS.get(row["type"], "relation")
                objects = {"hallu": row.need("hallu"), "folder": annotations.parent} if generative else {}
                notes[str(row.need("id"))] = {"kind": kind, "truth": row.need("truth"), **objects}
        items = []
        for row in records.read_records(queries):
            key = str(row.need("id"))
            if key in notes:
                image = records.find_image(self.home(data_dir), row.need("image"), "image", "images")
                items.append(Item(key, row.need("query"), (image,), notes[key]))
        return items

    def image_files(self, data_dir: Path, limit: int | None = None) -> list[Remote]:
        """Return one archive; only the images of the first items are unpacked."""
        names = {image.name for item in self.load(data_dir)[:limit] for image in item.images}
        return [Remote("amber/image/images.zip", (_IMAGES,), members=tuple(sorted(names)))]

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        parts = []
        captions = [item for item in items if item.meta["kind"] == "generative"]
        if captions:
            words = read_vocabulary(captions[0].meta["folder"])
            similar = spacy_similarity() if self.similarity == "spacy" else eq
            counts = {
                i.id: score_caption(nouns(answers[i.id]), i.meta["truth"], i.meta["hallu"], words, similar)
                for i in captions
            }
            parts.append(score_captions(counts))
        questions = [item for item in items if item.meta["kind"] != "generative"]
        if questions:
            parse = parse_official if self.parser == "official" else parse_vlmevalkit
            rows = ((i.id, parse(answers[i.id]), i.meta["truth"], i.meta["kind"]) for i in questions)
            parts.append(score_answers(rows))
        metrics = {name: value for part in parts for name, value in part.metrics.items()}
        if len(parts) == 2:
            metrics["AMBER"] = (100 - metrics["CHAIR"] + metrics["F1"]) / 2
        per_item = {name: units for part in parts for name, units in part.per_item.items()}
        totals = {name: value for part in parts for name, value in part.counts.items()}
        notes = (language.version(),) if captions else ()
        if captions and self.similarity == "exact":
            exact = "Objects are matched by equal words only (similarity=exact), which is not the official rule."
            notes = (exact, *notes)
        return Scores(metrics, per_item, totals, notes)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read the word lists next to the annotations."""
    related = records.read_json(folder / "relation.json")
    safe = records.read_text(folder / "safe_words.txt").split("\n")
    return Vocabulary(related, frozenset(word for word in safe if word))
