"""The sample browser of an evaluation: a folder with one page, which can be opened from disk, and small copies of the images.

All texts and numbers come from the logs. An image is only copied if it is the one that the log describes, by its hash.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from revisit.decoding.method_id import assignments
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Scores
from revisit.eval.compare import control_notes, variants_of
from revisit.eval.log import Answer, Log, unfinished
from revisit.eval.report.comparisons import heading, ranked
from revisit.io.files import inside, make_folder, path_within, read_file, write_bytes
from revisit.io.finder import is_video
from revisit.io.images import MAX_BYTES, open_image
from revisit.io.records import Fields
from revisit.pages.document import check_writable, script_page, write_page
from revisit.video.clip import TIME, shown_images
from revisit.video.reading import open_video
from revisit.video.sampling import EIGHT_FRAMES, Sampling
from revisit.words import wrong_spans

logger = logging.getLogger(__name__)

IMAGES = "images"  # the folder of the copies
SIDE = 640  # longest side of a copied image
# The page can only load files of its folder, which have a file: address when it is opened from disk.
POLICY = "default-src 'none'; img-src data: 'self' file:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass
class Sample:
    """An item of a benchmark with the answers of all methods."""

    benchmark: str  # with its options
    id: str
    prompt: str
    images: Mapping[Path, str] = field(default_factory=dict)  # path -> SHA-256
    truth: str = ""
    answers: dict[int, Fields] = field(default_factory=dict)  # column -> answer
    sampling: Sampling = EIGHT_FRAMES  # of the videos

    def disagree(self, methods: Sequence[Fields]) -> bool:
        """Return whether methods, not counting controls, have different verdicts, or different texts if they were not scored."""
        compared = [answer for column, answer in self.answers.items() if not methods[column]["method"].control]
        return len({answer.get("v", answer["x"]) for answer in compared}) > 1


class PageColumns:
    """The columns of the page: one per model, method and seed, and per other setting in which logs of a benchmark differ."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self.logs = logs
        self.numbers: dict[Path, int] = {}  # path of a log -> its column
        self.methods: list[Fields] = []  # by column
        known: dict[tuple[str, ...], int] = {}
        variants: dict[Path, str] = {}
        for compared in self.by_benchmark().values():
            variants |= variants_of(compared)
        for log in self.logs:
            spec, variant = log.spec, variants[log.path]
            seed = f" seed {spec.seed}" if spec.seed else ""
            key = (spec.model, f"{spec.method}{seed}", variant)
            if key not in known:
                known[key] = len(known)
                settings = ", ".join(filter(None, (*assignments(spec.method.settings), variant)))
                column = {"model": spec.model, "name": spec.method.short + seed, "settings": settings}
                self.methods.append({**column, "method": spec.method})
            self.numbers[log.path] = known[key]

    def by_benchmark(self) -> dict[str, list[Log]]:
        """Return the logs of every benchmark."""
        logs: dict[str, list[Log]] = {}
        for log in self.logs:
            logs.setdefault(log.spec.benchmark, []).append(log)
        return logs

    def totals(self) -> Fields:
        """Return the main metric of every benchmark by column, as tables print it, or the progress of an unfinished log."""
        found: Fields = {}
        for benchmark, logs in self.by_benchmark().items():
            totals: dict[int, Fields] = {}
            metrics = [log.scores.shown[log.scores.headline] for log in logs if log.scores]
            cells = ranked(logs, metrics[0]) if metrics else []
            for number, log in enumerate(logs):
                if log.scores is None:
                    total: Fields = {"open": f"{log.answered} of {log.request.items}"}
                else:
                    value = [round(x, 4) for x in log.scores.value(metrics[0].name) if math.isfinite(x)]  # and interval
                    total = {"text": cells[number].text, "best": int(cells[number].rank == 1), "at": value}
                totals[self.numbers[log.path]] = total
            found[benchmark] = {"metric": heading(metrics[0]) if metrics else "", "of": totals}
        return found


def view(logs: Sequence[Log], out: Path, data: Path | None = None) -> Path:
    """Write the browser of all samples of some logs to the folder `out`; return the page.

    The images are read from the folder `data`, or else from where the evaluation read them.
    """
    columns, samples, notes = read_samples(logs, data)
    if not samples:
        raise RevisitError("There are no answers yet; finish `revisit eval` with this --out.")
    return write("/".join(logs[0].folder.resolve().parts[-2:]), columns, samples, out, notes)


def write(name: str, columns: PageColumns, samples: Sequence[Sample], out: Path, notes: Sequence[str] = ()) -> Path:
    """Write the page and its images; return the page."""
    page = check_writable(inside(make_folder(out), "index.html"))
    images, unread = copy_images(samples, make_folder(inside(out, IMAGES)))
    if unread:
        problem = f"{unread:,} images are not shown: they are missing or have changed since the run."
        logger.warning("%s To read them from another folder, use --data.", problem)
        notes = [*notes, problem]
    data: Fields = {
        "columns": [{key: c[key] for key in ("model", "name", "settings")} for c in columns.methods],
        "benchmarks": sorted({sample.benchmark for sample in samples}),
        "totals": columns.totals(),
        "notes": list(notes),
        "samples": [_payload(sample, images, columns) for sample in samples],
    }
    if len(columns.methods) > 1:
        differing = sum(sample.disagree(columns.methods) for sample in samples)
        title = f"The methods disagree on {differing:,} of {len(samples):,} samples"
    else:
        title = f"{len(samples):,} samples of {columns.methods[0]['name']}"
    text = script_page(
        title,
        data,
        styles=["viewer.css", "samples.css"],
        scripts=["viewer.js", "samples.js"],
        start="window.samples = new SampleBrowser(main, data);",
        meta=f"{name} · {', '.join(dict.fromkeys(c['model'] for c in columns.methods))}",
        policy=POLICY,
    )
    return write_page(page, text)


def read_samples(logs: Sequence[Log], data: Path | None = None) -> tuple[PageColumns, list[Sample], list[str]]:
    """Return the columns, every item that was answered with the answers of all methods, and notes for the top of the page.

    Items are in the order of the benchmarks and of their ids. The first note tells that a run is incomplete.
    """
    columns, samples = PageColumns(logs), dict[tuple[str, str, str], Sample]()
    notes = [*filter(None, [unfinished(logs)]), *control_notes(logs)]
    for log in logs:
        if any(len(answer.image_hashes) < len(answer.images) for answer in log.current()):
            notes.append(
                f"{log.title} was evaluated by an older version: run the same command again to show its images."
            )
        sampling = Sampling(log.spec.options.get("frames"), log.spec.options.get("fps"))
        for answer in (*log.current(), *log.failed):
            key = (log.spec.benchmark, answer.id, answer.prompt)
            if key not in samples:
                images = (path_within(data or Path(log.request.data), image) for image in answer.images)
                truth = answer.target if isinstance(answer.target, str) else ", ".join(answer.target)
                shown = dict(zip(images, answer.image_hashes, strict=False))
                samples[key] = Sample(*key, shown, truth, sampling=sampling)
            samples[key].answers[columns.numbers[log.path]] = _answer(answer, log.scores)
    benchmarks = list(dict.fromkeys(sample.benchmark for sample in samples.values()))
    ordered = sorted(samples.values(), key=lambda s: (benchmarks.index(s.benchmark), natural_order(s.id)))
    return columns, ordered, notes


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in names by their value."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _answer(answer: Answer, scores: Scores | None) -> Fields:
    """Return an answer with short keys: text (x), steps (n), changed steps (c), wrong words (w), verdict (v), bad.

    Answers of an unfinished log, or of a benchmark that is not scored item by item, have no verdict.
    """
    if answer.error:
        return {"x": "", "c": 0, "n": 0, "v": f"no answer: {answer.error}", "bad": 1}
    entry: Fields = {
        "x": answer.text,
        "c": answer.counters.get("changed", 0),
        "n": answer.counters.get("steps", 0),
    }
    if isinstance(answer.target, tuple):
        entry["w"] = wrong_spans(answer.text, answer.target)
    text, bad = scores.verdict(answer.id) if scores else ("", False)
    return {**entry, **({"v": text} if text else {}), **({"bad": 1} if bad else {})}


# The address of each copy relative to the page, and the time of a frame.
Copies = dict[tuple[Path, Sampling], list[tuple[str, float | None]]]


def copy_images(samples: Sequence[Sample], folder: Path) -> tuple[Copies, int]:
    """Write a small copy of every image, and of each frame of a video, with its hash; return them, and the number of the others.

    A log may come from somebody else: the hash keeps it from naming files that its author did not have.
    """
    copies: Copies = {}
    sources = {(path, sample.sampling): checksum for sample in samples for path, checksum in sample.images.items()}
    for (path, sampling), checksum in sources.items():
        try:
            content = read_file(path, MAX_BYTES)
            if hashlib.sha256(content).hexdigest() != checksum:
                continue
            images = shown_images([open_video(content, sampling) if is_video(path) else open_image(content)])
        except (OSError, RevisitError):
            continue
        copies[path, sampling] = own = []
        for number, image in enumerate(images):
            name = f"{len(copies) - 1:06d}{f'-{number}' if is_video(path) else ''}.jpg"
            own.append((f"{IMAGES}/{name}", image.info.get(TIME)))
            image.thumbnail((SIDE, SIDE))
            image.save(small := io.BytesIO(), "JPEG", quality=82)
            write_bytes(inside(folder, name), small.getvalue())
    return copies, len(sources) - len(copies)


def _payload(sample: Sample, images: Copies, columns: PageColumns) -> Fields:
    """Return a sample with short keys, because a page may have ten thousand."""
    entry: Fields = {"b": sample.benchmark, "i": sample.id, "q": sample.prompt}
    copies = [copy for path in sample.images for copy in images.get((path, sample.sampling), ())]
    entry["p"] = [name for name, _ in copies]
    if any(time is not None for _, time in copies):
        entry["s"] = [time for _, time in copies]
    if sample.truth:
        entry["t"] = sample.truth
    entry["a"] = sample.answers
    if sample.disagree(columns.methods):
        entry["d"] = 1
    if sample.images and (text := command(sample, columns)):
        entry["cmd"] = text
    return entry


def command(sample: Sample, columns: PageColumns) -> str:
    """Return the command that writes the decode page of a sample, with all methods of the last model except controls."""
    answered = [columns.methods[number] for number in sorted(sample.answers)]
    methods = [method for method in answered if not method["method"].control]
    if not methods:
        return ""
    model = methods[-1]["model"]
    first, *others = dict.fromkeys(c["method"].command for c in reversed(methods) if c["model"] == model)
    here = Path.cwd()
    images = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in sample.images]
    together = ["--together"] if len(images) > 1 else []
    options = [("--model", model), ("--method", first)]
    options += [(f"--{name}", f"{value:g}") for name, value in vars(sample.sampling).items() if value is not None]
    options += [("--prompt", sample.prompt), ("--html", "decode.html")]
    options += [("--compare-with", other) for other in others[::-1] or ["none"]]
    return shlex.join(["revisit", "generate", *images, *together, *(word for option in options for word in option)])
