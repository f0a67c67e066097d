"""The sample browser of an evaluation: a folder with one page that works from disk, and small copies of the pictures.

Questions, answers and scores come from the run, pictures and truth from the benchmark's data folder, if it is still there.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revisit.benchmarks import registry
from revisit.benchmarks.base import Item, Metric
from revisit.decoding.method import value_text
from revisit.errors import RevisitError
from revisit.evaluation.records import Answer, ScoresRecord, Stored
from revisit.evaluation.store import make_folder, read_answers, read_results, read_scores, unfinished
from revisit.models.images import open_image
from revisit.pages.document import check_writable, script_page, write_page
from revisit.report.comparisons import heading, ranked, stored_value

log = logging.getLogger(__name__)

PICTURES = "pictures"  # the folder of the copies
SIDE = 640  # longest side of a copied picture
# keys of Item.meta, in this order
TRUTH = ("ground_truth", "gold", "label", "answer", "answers", "truth", "gt_answer", "category")
# The page's own folder is all it may read; from disk that is a file: address.
POLICY = "default-src 'none'; img-src data: 'self' file:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass
class Sample:
    """One question of a benchmark with every method's answer to it."""

    benchmark: str  # with its options
    item: Item
    prompt: str  # as it was asked
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)  # column -> answer

    @property
    def disagree(self) -> bool:
        """Whether two methods answered differently."""
        return len({answer["x"] for answer in self.answers.values()}) > 1


@dataclass
class Columns:
    """The model and method pairs of a run, in the order of its cells."""

    cells: dict[tuple[str, str], int] = field(default_factory=dict)
    methods: list[dict[str, Any]] = field(default_factory=list)
    planned: dict[str, dict[int, Mapping[str, Any]]] = field(default_factory=dict)  # benchmark -> column -> cell

    def of(self, cell: Mapping[str, Any]) -> int:
        """The column of a cell; one more seed is one more column."""
        seed = f" seed {cell['seed']}" if cell["seed"] else ""
        label = str(cell["method"]["label"])
        key = (str(cell["model"]["name"]), label + seed)
        if key not in self.cells:
            self.cells[key] = len(self.cells)
            entry = {"name": cell["method"]["name"], **cell["method"]["settings"]}
            name, _, own = label.partition("(")
            shown = {"model": key[0], "name": name + seed, "settings": own.removesuffix(")")}
            self.methods.append({**shown, "method": entry})
        self.planned.setdefault(str(cell["benchmark"]["label"]), {})[self.cells[key]] = cell
        return self.cells[key]

    def totals(self) -> dict[str, Any]:
        """The headline metric of every benchmark, by column, as tables print it; of unfinished cells how far they are."""
        found: dict[str, Any] = {}
        for benchmark, cells in self.planned.items():
            done = {column: cell for column, cell in cells.items() if cell["status"] == "complete"}
            totals: dict[int, dict[str, Any]] = {
                c: {"open": f"{cell['answers']} of {cell['items']}"} for c, cell in cells.items() if c not in done
            }
            name = str(next(iter(cells.values()))["benchmark"]["headline"])
            shown = name
            if done:
                metric = Metric.from_record(name, next(iter(done.values()))["metrics"][name])
                shown = heading(metric)
                for (column, cell), printed in zip(done.items(), ranked(list(done.values()), metric), strict=True):
                    value = stored_value(cell, metric)[0]
                    bar = {"bar": round(value / 100, 4)} if 0 <= value <= 100 else {}
                    totals[column] = {"text": printed.text, "best": int(printed.rank == 1), **bar}
            found[benchmark] = {"metric": shown, "of": totals}
        return found


def build(run: Path, out: Path) -> Path:
    """Write the browser of a run's samples below `out`; returns the page."""
    columns, samples, notes = read_samples(run)
    if not samples:
        raise RevisitError(f"{run} contains no answers yet; finish `revisit eval` with this --out.")
    return write("/".join(run.resolve().parts[-2:]), columns, samples, out, notes)


def write(name: str, columns: Columns, samples: Sequence[Sample], out: Path, notes: Sequence[str] = ()) -> Path:
    """Write the page and its pictures; returns the page."""
    page = check_writable(make_folder(out) / "index.html")
    pictures = copy_pictures(samples, out / PICTURES)
    data: dict[str, Any] = {
        "columns": [{key: c[key] for key in ("model", "name", "settings")} for c in columns.methods],
        "benchmarks": sorted({sample.benchmark for sample in samples}),
        "totals": columns.totals(),
        "notes": list(notes),
        "samples": [_payload(sample, pictures, columns) for sample in samples],
    }
    methods = len({method["name"] for method in columns.methods})
    text = script_page(
        f"{name} · {methods} method{'s' if methods != 1 else ''}",
        data,
        styles=["viewer.css", "samples.css"],
        scripts=["viewer.js", "samples.js"],
        start="window.samples = new SampleBrowser(main, data);",
        meta=f"{', '.join(dict.fromkeys(c['model'] for c in columns.methods))} · {len(samples):,} samples",
        policy=POLICY,
    )
    return write_page(page, text)


def read_samples(run: Path) -> tuple[Columns, list[Sample], list[str]]:
    """Every item that was answered, with the answers of all methods, in the order of the benchmarks and of their ids.

    The third value is what a reader must know, first of all whether the run is incomplete.
    """
    results = read_results(run)
    columns, found = Columns(), dict[tuple[str, str, str], Sample]()
    notes = [notice] if (notice := unfinished(results)) else []
    for cell in results["cells"]:
        columns.of(cell)
    for cell, lines, scores, items in begun_cells(run, results, notes):
        name = str(cell["benchmark"]["label"])
        for line in lines:
            known = items.get(line.id) or Item(line.id, line.prompt)
            sample = found.setdefault((name, line.id, line.prompt), Sample(name, known, line.prompt))
            sample.answers[columns.of(cell)] = _answer(line, scores, cell, known)
    benchmarks = list(dict.fromkeys(sample.benchmark for sample in found.values()))
    ordered = sorted(found.values(), key=lambda s: (benchmarks.index(s.benchmark), natural_order(s.item.id)))
    return columns, ordered, notes


def begun_cells(
    run: Path, results: Stored, notes: list[str]
) -> Iterator[tuple[Stored, list[Answer], ScoresRecord | None, dict[str, Item]]]:
    """Every cell of a run with a folder: its entry, its answers, its scores if it is complete, and the benchmark's items by id.

    Answers to an item whose content has changed since are left out; `notes` gets a line if the items cannot be read.
    """
    known: dict[tuple[str, str], dict[str, Item]] = {}
    for cell in results["cells"]:
        folder = run / cell["path"]
        if not folder.is_dir():
            continue
        place = (str(cell["benchmark"]["label"]), str(cell["provenance"]["data"] or ""))
        if place not in known:
            known[place] = items_of(cell["benchmark"], place[1], notes)
        scores = read_scores(folder) if cell["status"] == "complete" else None
        lines = read_answers(folder / "answers.jsonl")
        kept = [line for line in lines if scores is None or scores.items.get(line.id) in (None, line.item)]
        yield cell, kept, scores, known[place]


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts names as a reader would: numbers in them by their value."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def items_of(benchmark: Mapping[str, Any], data: str, notes: list[str]) -> dict[str, Item]:
    """The items of a benchmark by id; if its data can no longer be read, none and a note."""
    options = {name: value for name, value in benchmark["options"].items() if name != "judge"}  # for scores only
    if data and not Path(data).is_absolute() and not Path(data).exists():
        notes.append(
            f"Pictures and truth of {benchmark['label']} are not shown: there is no {data} here; run this command in the folder "
            "in which `revisit eval` ran."
        )
        return {}
    try:
        return {item.id: item for item in registry.get(benchmark["name"], **options).load(Path(data))} if data else {}
    except (RevisitError, OSError) as error:
        notes.append(f"Pictures and truth of {benchmark['label']} are not shown: {error}")
        return {}


def _answer(line: Answer, scores: ScoresRecord | None, cell: Mapping[str, Any], item: Item) -> dict[str, Any]:
    """One answer with short keys: text, marked words, verdict and whether it is bad, steps that were changed.

    Without a verdict: an answer of an unfinished cell, or of a benchmark that does not count sample by sample.
    """
    from revisit.explain.record import wrong_spans

    terms = {m: units[line.id] for m, units in (scores.per_item if scores else {}).items() if line.id in units}
    shown = item.meta.get("ground_truth")
    entry: dict[str, Any] = {"x": line.text, "c": line.counters.get("changed", 0), "n": line.counters.get("steps", 0)}
    if isinstance(shown, (list, tuple)):
        entry["w"] = wrong_spans(line.text, shown)
    text, bad = verdict(terms, cell["metrics"], str(cell["benchmark"]["headline"]))
    return {**entry, **({"v": text} if text else {}), **({"bad": 1} if bad else {})}


def verdict(terms: Mapping[str, tuple[float, float]], metrics: Mapping[str, Any], headline: str) -> tuple[str, bool]:
    """An answer in a word, and whether it fails: by the headline metric if it is counted per item, else by accuracy.

    A part's metric ("coco_random/accuracy") is printed like the whole. Empty if neither metric is counted per item.
    """
    for wanted in ((headline,), ("accuracy", "acc")):
        for name, (numerator, denominator) in terms.items():
            last = name.rpartition("/")[2]
            about = metrics.get(name) or metrics.get(last)
            if not denominator or (name not in wanted and last not in wanted) or not about or not about["better"]:
                continue
            if about["better"] == "lower":
                right, wrong = ("no hallucination", "hallucinated") if "CHAIR" in headline else ("right", "wrong")
                return (wrong, True) if numerator > 0 else (right, False)
            if 0 < numerator != denominator:
                return f"score {Metric.from_record(last, about).text(numerator / denominator)}", numerator < denominator
            return ("wrong", True) if numerator < denominator else ("right", False)
    return "", False


def copy_pictures(samples: Sequence[Sample], folder: Path) -> dict[Path, str]:
    """A copy of every picture, for screens; returns its address relative to the page."""
    paths = dict.fromkeys(path for sample in samples for path in sample.item.images)
    addresses: dict[Path, str] = {}
    for number, path in enumerate(paths):
        name = f"{number:06d}.jpg"
        try:
            image = open_image(path)
        except RevisitError as error:
            log.warning("%s", error)
            continue
        image.thumbnail((SIDE, SIDE))
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / name, "JPEG", quality=82)
        addresses[path] = f"{PICTURES}/{name}"
    return addresses


def _payload(sample: Sample, pictures: Mapping[Path, str], columns: Columns) -> dict[str, Any]:
    """One sample with short keys; there may be ten thousand."""
    entry: dict[str, Any] = {"b": sample.benchmark, "i": sample.item.id, "q": sample.prompt}
    entry["p"] = [pictures[path] for path in sample.item.images if path in pictures]
    if truth := truth_of(sample.item):
        entry["t"] = truth
    entry["a"] = sample.answers
    if sample.disagree:
        entry["d"] = 1
    if sample.item.images:
        entry["cmd"] = command(sample, columns)
    return entry


def truth_of(item: Item) -> str:
    """The correct answer, if the item has one."""
    found: Any = next((item.meta[key] for key in TRUTH if item.meta.get(key) not in (None, "", [])), "")
    row = item.meta.get("row")
    if not found and isinstance(row, Mapping):
        found = next((row[key] for key in ("gt_answer_details", "gt_answer", "answer") if row.get(key)), "")
    if isinstance(found, (list, tuple, set, frozenset)):
        return ", ".join(map(str, found))
    return str(found)


def command(sample: Sample, columns: Columns) -> str:
    """The command that writes the decode page of a sample."""
    last = columns.methods[max(sample.answers)]
    here = Path.cwd()
    images = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in sample.item.images]
    together = ["--together"] if len(images) > 1 else []
    options = {"--model": last["model"], "--method": value_text(last["method"]), "--prompt": sample.prompt}
    words = [word for option in {**options, "--html": "decode.html"}.items() for word in option]
    return shlex.join(["revisit", "generate", *images, *together, *words])
