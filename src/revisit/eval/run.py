"""Run an evaluation: answer every item once, store each batch before decoding the next, and score each log when it is complete.

A resumed run equals an uninterrupted one. Batches are cut from the complete list of items, whatever is stored; a batch with a missing
answer is decoded again as a whole, and only missing answers are added. Every item has its own seed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Benchmark, Item
from revisit.eval.benchmarks.language import require_data
from revisit.eval.config import EvalConfig
from revisit.eval.controls import ONLY_VISUAL, controlled, controls_of
from revisit.eval.engines.base import Engine, open_engine
from revisit.eval.log import Answer, Frame, Log, check_layout, request_numbers, write_results
from revisit.eval.spec import Spec
from revisit.guard.rates import Rate
from revisit.io.files import digest, file_digest, make_folder, path_within, read_file
from revisit.io.finder import is_video
from revisit.io.records import Fields
from revisit.video.sampling import Sampling

HOPELESS = 8  # items that fail before any was answered; the settings are wrong then, not the items


class Reporter:
    """Receives the progress of a run; this one shows nothing."""

    def plan(self, logs: int, answers: int, stored: int) -> None:
        """Show the number of logs and answers that follow; `start` is called for each log."""

    def start(self, title: str, total: int, done: int) -> None:
        """Begin a task of `total` steps, some of them `done` before."""

    def advance(self, count: int, failed: int = 0) -> None:
        """Count further steps, some of which failed."""

    def note(self, text: str) -> None:
        """Show a sentence to the user."""


@dataclass(frozen=True)
class Job:
    """The work that completes one log: an engine answers the items of a benchmark with a method."""

    spec: Spec
    engine: Engine
    method: Method
    benchmark: Benchmark
    items: list[Item]  # in a control, with other images than the benchmark's
    out: Path
    request: Fields  # of this command; see `Log.begin`

    @contextmanager
    def log(self) -> Iterator[Log]:
        """Open the log, and store the request of this command in it."""
        with closing(Log.open(self.out, self.spec)) as log:
            log.begin(self.items, **self.request)
            yield log


def evaluate(
    model: object = "tiny",
    benchmark: object = ("chair", "pope"),
    *,
    method: object = ("greedy", "revisit"),
    data: Any = None,
    limit: int | None = None,
    out: str | Path = "results",
    reporter: Reporter | None = None,
    **options: Any,
) -> list[Log]:
    """Evaluate methods on benchmarks. To resume a stopped evaluation, call it again with the same arguments.

    Args:
        model: A name, several, or the pair (model, processor) of `revisit.load`.
        benchmark: A name, several, or benchmark objects; with options, `"pope:parser=vcd"`.
        method: A name, several, or method objects; with settings, `"revisit:alpha=0.01"`.
        data: The folder with the benchmarks' files, a mapping of benchmark to folder, `"download"`, or `"scenes:SPLIT:NUMBER:SEED"`.
        limit: Use only the first items of each benchmark.
        out: The folder for logs and results.
        reporter: Shows the progress.
        **options: As for `revisit eval`, with underscores: `batch_size`, `max_new_tokens`, `sample`, `seeds`, `dtype`, …

    Returns:
        One log per model, benchmark, method and seed, each with its scores. Items that could not be answered are in `Log.failed`, each
        with its `error`; they are left out of the scores, and the next call tries them again.

    Raises:
        RevisitError: An option is wrong, or no item can be answered.
    """
    config = EvalConfig(model=model, benchmark=benchmark, method=method, data=data, limit=limit, out=out, **options)
    return run(config, reporter)


def run(
    config: EvalConfig, reporter: Reporter | None = None, engine_for: Callable[[Any], Engine] | None = None
) -> list[Log]:
    """Generate and score all answers of a configuration that are not stored yet; return the logs.

    Args:
        config: The options.
        reporter: Shows the progress.
        engine_for: Opens the engine of a model; by default the configured one.
    """
    reporter = reporter or Reporter()
    engine_for = engine_for or (lambda model: open_engine(config.engine, model, **config.engine_options))
    config.check()
    need(*config.packages())
    if config.needs_nltk_data:
        require_data()  # before anything is downloaded or generated
    out = Path(config.out)
    check_layout(out)
    benchmarks = read_items(config, reporter)
    make_folder(out)
    numbers = request_numbers(out)
    with ExitStack() as stack:
        jobs, missing = list[Job](), 0
        for name, model in config.models.items():
            engine = engine_for(model)
            stack.callback(engine.close)
            methods = config.methods_for(name)
            if (rate := config.rate_for(name)) is not None:
                reporter.note(promise(config, rate, engine, methods, benchmarks))
            for benchmark, items in benchmarks:
                make = partial(make_job, config, engine, numbers, benchmark)
                subset = visual_items(config, make, methods, items, reporter) if config.only_visual else items
                for method, control, shown in conditions(methods, subset, config.controls):
                    for seed in config.all_seeds:  # all logs are on disk before the first answer
                        jobs.append(make(method, shown, seed, control, len(items) - len(subset)))
                        with jobs[-1].log() as log:
                            missing += len(log.missing(jobs[-1].items))
            if len(config.models) > 1:
                engine.close()  # the specs or --only-visual may have loaded the model
        answers, logs = sum(len(job.items) for job in jobs), list[Log]()
        reporter.plan(len(jobs), answers, answers - missing)
        for engine, group in groupby(jobs, lambda job: job.engine):
            for job in group:
                with job.log() as log:
                    try:
                        answer(job, log, config.batch_size, reporter)
                    except RevisitError:
                        log.discard_if_empty()  # a wrong setting does not leave an unfinished log
                        raise
                logs.append(log)
            engine.close()  # frees memory for the next model
    write_results(out)
    return logs


def promise(
    config: EvalConfig,
    rate: Rate,
    engine: Engine,
    methods: Sequence[Method],
    benchmarks: Sequence[tuple[Benchmark, list[Item]]],
) -> str:
    """Return the promise of a rate for these items; raise RevisitError if it does not hold for some of them."""
    plain = config.decoding == Decoding()
    pair: Any = engine.loaded  # type: ignore[attr-defined]  # of the local engine, and vLLM's
    calls = {
        (method, item.prompt, config.decoding_for(benchmark).max_new_tokens)
        for benchmark, items in benchmarks
        for item in items
        if not item.error
        for method in methods
    }
    notes = [rate.checked(*pair, *call, plain=plain, any_calibration=config.any_calibration) for call in calls]
    return " ".join(dict.fromkeys(notes))


def conditions(methods: Sequence[Method], items: list[Item], controls: bool) -> list[tuple[Method, str, list[Item]]]:
    """Return each method with the items, then plain decoding with the items of each control."""
    blind = (
        [(plain(methods), control, controlled(items, control)) for control in controls_of(items)] if controls else []
    )
    return [*((method, "", items) for method in methods), *blind]


def plain(methods: Sequence[Method]) -> Method:
    """Return greedy decoding, which runs with controls or --only-visual include."""
    return next(method for method in methods if method.name == "greedy")


def make_job(
    config: EvalConfig,
    engine: Engine,
    numbers: Mapping[str, int],
    benchmark: Benchmark,
    method: Method,
    items: list[Item],
    seed: int,
    control: str = "",
    excluded: int = 0,
) -> Job:
    """Return the work for a method on a benchmark."""
    identity, decoding = engine.identity(config.batch_size, items), config.decoding_for(benchmark)
    spec = Spec.of(identity, method, benchmark, decoding, seed, control, ONLY_VISUAL if excluded else "")
    request = {
        "number": numbers.get(spec.similar, 0),
        "data": str(config.folders[benchmark.name]),
        "limit": config.limit_of(benchmark.name),
        "batch_size": config.batch_size,
        "excluded": excluded,
    }
    return Job(spec, engine, method, benchmark, items, Path(config.out), request)


def visual_items(
    config: EvalConfig, make: Callable[..., Job], methods: Sequence[Method], items: list[Item], reporter: Reporter
) -> list[Item]:
    """Return the items that plain decoding does not answer correctly without the image, under the first seed."""
    control = controls_of(items)[0]
    job = make(plain(methods), controlled(items, control), config.all_seeds[0], control)
    with job.log() as log:
        answer(job, log, config.batch_size, reporter)
    if log.scores is None:
        raise RevisitError(f"{log.title} has no score, so no visual item is known.")
    verdicts = {id: log.scores.verdict(id) for id in log.scores.items}
    if not all(text for text, _ in verdicts.values()):
        raise RevisitError(f"--only-visual needs items that are scored one by one, unlike {job.benchmark.title}'s.")
    visual = [item for item in items if item.id not in verdicts or verdicts[item.id][1]]  # failed items stay
    if not any(item.id in verdicts for item in visual):
        raise RevisitError(f"{log.title}: all items are answered correctly, so no visual item is left.")
    return visual


def answer(job: Job, log: Log, batch_size: int, reporter: Reporter) -> None:
    """Generate the missing answers of a job's log, then score it.

    An item that cannot be answered is stored with its error. RevisitError is raised if this happens to the first `HOPELESS` items.
    """
    if log.damaged:
        reporter.note(f"{log.path}: skipped {log.damaged} damaged lines; answers that are missing are generated again.")
    missing = {item.id for item in log.missing(job.items)}
    described = {
        (item.id, item.hash): {
            "images": tuple(Path(os.path.relpath(path, log.request.data)).as_posix() for path in item.images),
            "image_hashes": item.image_hashes,
            "frames": tuple(Frame(index=index, time=time) for index, time in item.frames),
            "target": item.target,
        }
        for item in job.items
        if not item.error
    }
    reporter.start(log.title, len(job.items), len(job.items) - len(missing))
    unreadable = [item for item in job.items if item.error]
    log.append(Answer.failure(item, item.error) for item in unreadable)
    reporter.advance(len(unreadable), len(unreadable))
    readable = [item for item in job.items if not item.error]
    batches = [batch for batch in make_batches(readable, batch_size) if any(item.id in missing for item in batch)]
    errors: list[str] = []
    if batches:
        for answers in job.engine.stream(job.method, Decoding(**job.spec.decoding), job.spec.seed, batches):
            errors += [a.error for a in answers if a.error]
            log.append(a.model_copy(update=described[a.id, a.item]) for a in answers)
            reporter.advance(sum(a.id in missing for a in answers), sum(bool(a.error) for a in answers))
            if len(errors) >= HOPELESS and not log.current():
                break
    if errors and not log.current():
        raise RevisitError(errors[0])
    log.describe(described)
    try:
        log.score(job.benchmark, job.items)
    except RevisitError as error:
        if not log.failed:
            raise
        reporter.note(f"{log.title} cannot be scored without the failed items: {error}")


def make_batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Cut items into batches of similar prompt length. The longest come first, so a run without enough memory fails early."""
    # Images make a prompt longer than its text. The sort is stable, so ties keep the benchmark's order.
    ordered = sorted(items, key=lambda item: -(len(item.prompt) + 1000 * (len(item.images) + len(item.frames))))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


# -- items ----------------------------------------------------------------------------------------------------------


def read_items(config: EvalConfig, reporter: Reporter) -> list[tuple[Benchmark, list[Item]]]:
    """Return every benchmark with its items up to the limit, and set their hashes; each image is read once."""
    contents: dict[Source, Content] = {}
    benchmarks = []
    for benchmark in config.benchmarks:
        folder = config.folders[benchmark.name]
        items = benchmark.load(folder)[: config.limit_of(benchmark.name)]
        if not items:
            raise RevisitError(f"Benchmark {benchmark.name!r} has no items in {folder}.")
        if repeated := [id for id, count in Counter(item.id for item in items).items() if count > 1]:
            raise RevisitError(f"Benchmark {benchmark.name!r} has two items with the id {repeated[0]!r} in {folder}.")
        reporter.note(f"{benchmark.name}: {len(items)} items from {folder}")
        named = dict.fromkeys((path, item.sampling) for item in items for path in item.images)
        sources = [source for source in named if source not in contents]
        with ThreadPoolExecutor(4) as pool:
            contents |= zip(sources, pool.map(partial(read_source, folder), sources), strict=True)
        items = [_hashed(item, contents) for item in items]
        if all(item.error for item in items):  # most likely another folder's
            raise RevisitError(f"No item of {benchmark.name} can be read: {items[0].error.rstrip('.')}.")
        benchmarks.append((benchmark, items))
    return benchmarks


Source = tuple[Path, Sampling]  # an image or a video, and which frames are taken from a video


@dataclass(frozen=True)
class Content:
    """The SHA-256 of an image or a video, the index and time of the frames that are taken from it, or why it cannot be read."""

    hash: str = ""
    frames: tuple[tuple[int, float], ...] = ()
    problem: str = ""


def _hashed(item: Item, contents: Mapping[Source, Content]) -> Item:
    """Return an item with its hash, the hashes of its images and the frames of its videos, or with the error of a file."""
    own = [(path, contents[path, item.sampling]) for path in item.images]
    frames = [content.frames for _, content in own if content.frames]
    unread = [f"{str(path)[-200:]} cannot be read ({c.problem.rstrip('.')})" for path, c in own if c.problem]
    hashes = tuple(content.hash for _, content in own)
    hash, error = digest([item.prompt, hashes, *([frames] if frames else [])]), item.error or "; ".join(unread)
    return replace(item, image_hashes=hashes, frames=tuple(chain(*frames)), hash=hash, error=error)


def read_source(folder: Path, source: Source) -> Content:
    """Return the content of an image or a video in the data folder; of a video, without decoding it."""
    from revisit.io.images import MAX_BYTES, read_image  # Pillow is slow to import
    from revisit.video.reading import list_frames

    path, sampling = source
    try:
        path = path_within(folder, path)
        if is_video(path):
            with path.open("rb") as file:
                return Content(file_digest(path), tuple(list_frames(file, repr(path.name), sampling)))
        content = read_file(path, MAX_BYTES)
        read_image(content, repr(path.name))
    except OSError as error:
        return Content(problem=error.strerror or str(error))
    except Exception as error:  # Pillow has no common error for broken files
        return Content(problem=str(error) or type(error).__name__)
    return Content(hashlib.sha256(content).hexdigest())
