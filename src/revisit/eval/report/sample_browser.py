"""The sample browser of an evaluation: a folder with one page that works from disk, and small copies of the images.

Questions, answers, images and scores come from the logs; the correct answers from the benchmark's data, if they can be read.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revisit.decoding.method import value_text
from revisit.errors import RevisitError
from revisit.eval import benchmarks
from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.compare import control_notes, variants_of
from revisit.eval.log import Answer, Log, unfinished
from revisit.eval.report.comparisons import heading, ranked
from revisit.explain.document import check_writable, script_page, write_page
from revisit.explain.files import path_within, disk_error, make_folder
from revisit.models.images import open_image

logger = logging.getLogger(__name__)

IMAGES = "images"  # the folder of the copies
SIDE = 640  # longest side of a copied image
# keys of Item.meta, in this order
TRUTH = ("ground_truth", "gold", "label", "answer", "answers", "truth", "gt_answer", "category")
# The page may read its own folder only; from disk that is a file: address.
POLICY = "default-src 'none'; img-src data: 'self' file:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass
class Sample:
    """One question of a benchmark with every method's answer to it."""

    benchmark: str  # with its options
    id: str
    prompt: str
    images: tuple[Path, ...] = ()
    truth: str = ""
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)  # column -> answer

    def disagree(self, methods: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether answers of methods that see the image have different verdicts or, if they were not scored, texts."""
        seeing = [answer for column, answer in self.answers.items() if not methods[column]["control"]]
        return len({answer.get("v", answer["x"]) for answer in seeing}) > 1


@dataclass
class Columns:
    """The columns of the page: one per model, method and seed, and per other setting in which logs of a benchmark differ."""

    logs: Sequence[Log]
    of: dict[Path, int] = field(default_factory=dict)  # a log's path -> its column
    methods: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        known: dict[tuple[str, ...], int] = {}
        variants: dict[Path, str] = {}
        for label in dict.fromkeys(log.spec.benchmark for log in self.logs):
            variants |= variants_of([log for log in self.logs if log.spec.benchmark == label])
        for log in self.logs:
            spec = log.spec
            seed = f" seed {spec.seed}" if spec.seed else ""
            key = (spec.model, spec.method + seed, variants[log.path])
            if key not in known:
                known[key] = len(known)
                name, _, own = spec.method.partition("(")
                settings = ", ".join(filter(None, (own.removesuffix(")"), variants[log.path])))
                entry = {"name": spec.method_name, **spec.settings}
                about = {"model": spec.model, "name": name + seed, "settings": settings}
                self.methods.append({**about, "method": entry, "control": spec.control})
            self.of[log.path] = known[key]

    def totals(self) -> dict[str, Any]:
        """Return the headline metric of every benchmark, by column, as tables print it; of unfinished logs how far they are."""
        found: dict[str, Any] = {}
        for benchmark in dict.fromkeys(log.spec.benchmark for log in self.logs):
            own = [log for log in self.logs if log.spec.benchmark == benchmark]
            done = [(log, log.scores) for log in own if log.scores is not None]
            totals: dict[int, dict[str, Any]] = {
                self.of[log.path]: {"open": f"{log.answered} of {log.request.items}"}
                for log in own
                if log.scores is None
            }
            shown = ""
            if done:
                metric = done[0][1].shown[done[0][1].headline]
                shown = heading(metric)
                for (log, scores), printed in zip(done, ranked([log for log, _ in done], metric), strict=True):
                    known = [round(x, 4) for x in scores.value(metric.name) if math.isfinite(x)]  # value, low, high
                    totals[self.of[log.path]] = {"text": printed.text, "best": int(printed.rank == 1), "at": known}
            found[benchmark] = {"metric": shown, "of": totals}
        return found


def view(logs: Sequence[Log], out: Path) -> Path:
    """Write the browser of all samples of some logs below `out`; return the page."""
    columns, samples, notes = read_samples(logs)
    if not samples:
        raise RevisitError("There are no answers yet; finish `revisit eval` with this --out.")
    return write("/".join(logs[0].folder.resolve().parts[-2:]), columns, samples, out, notes)


def write(name: str, columns: Columns, samples: Sequence[Sample], out: Path, notes: Sequence[str] = ()) -> Path:
    """Write the page and its images; return the page."""
    page = check_writable(make_folder(out) / "index.html")
    images = copy_images(samples, out / IMAGES)
    data: dict[str, Any] = {
        "columns": [{key: c[key] for key in ("model", "name", "settings")} for c in columns.methods],
        "benchmarks": sorted({sample.benchmark for sample in samples}),
        "totals": columns.totals(),
        "notes": list(notes),
        "samples": [_payload(sample, images, columns) for sample in samples],
    }
    methods, differing = (
        {method["name"] for method in columns.methods},
        sum(s.disagree(columns.methods) for s in samples),
    )
    several = f"The methods disagree on {differing:,} of {len(samples):,} samples"
    text = script_page(
        several if len(columns.methods) > 1 else f"{len(samples):,} samples of {', '.join(methods)}",
        data,
        styles=["viewer.css", "samples.css"],
        scripts=["viewer.js", "samples.js"],
        start="window.samples = new SampleBrowser(main, data);",
        meta=f"{name} · {', '.join(dict.fromkeys(c['model'] for c in columns.methods))}",
        policy=POLICY,
    )
    return write_page(page, text)


def read_samples(logs: Sequence[Log]) -> tuple[Columns, list[Sample], list[str]]:
    """Return every item that was answered, with the answers of all methods, in the order of the benchmarks and of their ids.

    The third value is what a reader must know, first of all whether the run is incomplete.
    """
    columns, found = Columns(logs), dict[tuple[str, str, str], Sample]()
    notes = [*([notice] if (notice := unfinished(logs)) else []), *control_notes(logs)]
    known: dict[tuple[str, str | None], dict[str, Item]] = {}
    for log in logs:
        place = (log.spec.benchmark, log.request.data)
        if place not in known:
            known[place] = items_of(log, notes)
        for answer in log.current():
            item = known[place].get(answer.id)
            key = (log.spec.benchmark, answer.id, answer.prompt)
            if key not in found:
                found[key] = Sample(*key, images_of(log, answer), truth_of(item) if item else "")
            found[key].answers[columns.of[log.path]] = _answer(answer, log.scores, item)
    benchmarks = list(dict.fromkeys(sample.benchmark for sample in found.values()))
    ordered = sorted(found.values(), key=lambda s: (benchmarks.index(s.benchmark), natural_order(s.id)))
    return columns, ordered, notes


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names as a reader would: numbers in them by their value."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def items_of(log: Log, notes: list[str]) -> dict[str, Item]:
    """Return the items of a log's benchmark by id; none and a note if its data cannot be read."""
    spec, data = log.spec, log.request.data
    options = {name: value for name, value in spec.options.items() if name != "judge"}  # for scores only
    if data is None:
        return {}
    if not Path(data).exists():
        where = "" if Path(data).is_absolute() else "; run this command in the folder in which `revisit eval` ran"
        notes.append(f"Images and correct answers of {spec.benchmark} are not shown: there is no {data} here{where}.")
        return {}
    try:
        return {item.id: item for item in benchmarks.get(spec.benchmark_name, **options).load(Path(data))}
    except (RevisitError, OSError) as error:
        notes.append(f"Correct answers of {spec.benchmark} are not shown: {error}")
        return {}


def images_of(log: Log, answer: Answer) -> tuple[Path, ...]:
    """Return the images of an answer, below the log's data folder."""
    return tuple(path_within(Path(log.request.data), image) for image in answer.images) if log.request.data else ()


def _answer(answer: Answer, scores: Scores | None, item: Item | None) -> dict[str, Any]:
    """Return an answer with short keys: text, marked words, verdict and whether it is bad, steps that were changed.

    There is no verdict on answers of an unfinished log, or of a benchmark that does not count sample by sample.
    """
    from revisit.explain.record import wrong_spans

    entry: dict[str, Any] = {
        "x": answer.text,
        "c": answer.counters.get("changed", 0),
        "n": answer.counters.get("steps", 0),
    }
    shown = item.meta.get("ground_truth") if item else None
    if isinstance(shown, (list, tuple)):
        entry["w"] = wrong_spans(answer.text, shown)
    text, bad = scores.verdict(answer.id) if scores else ("", False)
    return {**entry, **({"v": text} if text else {}), **({"bad": 1} if bad else {})}


def copy_images(samples: Sequence[Sample], folder: Path) -> dict[Path, str]:
    """Copy every image in the size of a screen; return its address relative to the page."""
    addresses: dict[Path, str] = {}
    for number, path in enumerate(dict.fromkeys(path for sample in samples for path in sample.images)):
        name = f"{number:06d}.jpg"
        try:
            image = open_image(path)
        except RevisitError as error:
            logger.warning("%s", error)
            continue
        image.thumbnail((SIDE, SIDE))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / name, "JPEG", quality=82)
        except OSError as error:
            raise disk_error(error, folder) from error
        addresses[path] = f"{IMAGES}/{name}"
    return addresses


def _payload(sample: Sample, images: Mapping[Path, str], columns: Columns) -> dict[str, Any]:
    """Return a sample with short keys; there may be ten thousand."""
    entry: dict[str, Any] = {"b": sample.benchmark, "i": sample.id, "q": sample.prompt}
    entry["p"] = [images[path] for path in sample.images if path in images]
    if sample.truth:
        entry["t"] = sample.truth
    entry["a"] = sample.answers
    if sample.disagree(columns.methods):
        entry["d"] = 1
    if sample.images and (text := command(sample, columns)):
        entry["cmd"] = text
    return entry


def truth_of(item: Item) -> str:
    """Return the correct answer, if the item has one."""
    found: Any = next((item.meta[key] for key in TRUTH if item.meta.get(key) not in (None, "", [])), "")
    row = item.meta.get("row")
    if not found and isinstance(row, Mapping):
        found = next((row[key] for key in ("gt_answer_details", "gt_answer", "answer") if row.get(key)), "")
    if isinstance(found, (list, tuple, set, frozenset)):
        return ", ".join(map(str, found))
    return str(found)


def command(sample: Sample, columns: Columns) -> str:
    """Return the command that writes the decode page of a sample with all methods of the last model that can see the image."""
    seen = [columns.methods[place] for place in sorted(sample.answers) if not columns.methods[place]["control"]]
    if not seen:
        return ""
    first, *others = dict.fromkeys(value_text(c["method"]) for c in reversed(seen) if c["model"] == seen[-1]["model"])
    here = Path.cwd()
    images = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in sample.images]
    together = ["--together"] if len(images) > 1 else []
    options = [("--model", seen[-1]["model"]), ("--method", first)]
    options += [("--prompt", sample.prompt), ("--html", "decode.html")]
    options += [("--compare-with", other) for other in others[::-1] or ["none"]]
    return shlex.join(["revisit", "generate", *images, *together, *(word for option in options for word in option)])
