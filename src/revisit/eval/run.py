"""Run an evaluation: answer every item once, store every answer immediately, score each log when it is complete.

A resumed run equals an uninterrupted one: batches are cut from the complete list of items, whatever is stored; a batch with a missing
answer is decoded again as a whole, and only what is missing is added; every item has its own seed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark, Item
from revisit.eval.benchmarks.language import require_data
from revisit.eval.config import EvalConfig
from revisit.eval.controls import CONTROLS, NO_IMAGE, ONLY_VISUAL, controlled
from revisit.eval.engines.base import Engine, open_engine
from revisit.eval.log import Log, check_layout, item_hash, new_request, read_logs
from revisit.eval.report.results import write_results
from revisit.eval.spec import Spec
from revisit.explain.files import path_within, make_folder, read_file


class Reporter:
    """Receives the progress of a run; this one shows nothing."""

    def plan(self, logs: int, answers: int, stored: int) -> None:
        """Take the size of what follows; each log has a `start` of its own."""

    def start(self, title: str, total: int, done: int) -> None:
        """Begin a piece of work of `total` steps, of which `done` are done already."""

    def advance(self, count: int) -> None:
        """Count further steps."""

    def note(self, text: str) -> None:
        """Show a sentence to the reader."""


@dataclass(frozen=True)
class Questions:
    """The items of one benchmark, with their hashes."""

    benchmark: Benchmark
    folder: Path
    items: list[Item]
    left_out: int = 0  # items that are not in the subset


@dataclass(frozen=True)
class Task:
    """What one log needs: an engine, a method, and the items of a benchmark."""

    log: Log
    engine: Engine
    method: Method
    questions: Questions
    decoding: Decoding
    seed: int


def evaluate(
    model: Any = "tiny",
    benchmark: Any = ("chair", "pope"),
    *,
    method: Any = ("greedy", "revisit"),
    data: Any = None,
    limit: int | None = None,
    out: str | Path = "results",
    reporter: Reporter | None = None,
    **options: Any,
) -> list[Log]:
    """Evaluate methods on benchmarks. A stopped evaluation resumes when it is called again.

    Args:
        model: A name, several, or the pair (model, processor) of `revisit.load`.
        benchmark: A name, several, or benchmark objects; with options, `"pope:parser=vcd"`.
        method: A name, several, or method objects; with settings, `"revisit:alpha=0.01"`.
        data: The folder with the benchmarks' files, a mapping of benchmark to folder, `"download"`, or `"scenes:SPLIT:NUMBER:SEED"`.
        limit: Ask only the first items of each benchmark.
        out: The folder for logs and results.
        reporter: Shows the progress.
        **options: As for `revisit eval`, with underscores: `batch_size`, `max_new_tokens`, `sample`, `seeds`, `dtype`, …

    Returns:
        One log per model, benchmark, method and seed, each with its scores.

    Raises:
        RevisitError: An option is wrong, or an image cannot be read.
    """
    if not isinstance(out, (str, Path)):
        raise RevisitError(f"out must be a folder, not {out!r}.")
    path = str(data) if isinstance(data, Path) else data
    config = EvalConfig(
        model=model, benchmark=benchmark, method=method, data=path, limit=limit, out=str(out), **options
    )
    return run(config, reporter)


def run(
    config: EvalConfig, reporter: Reporter | None = None, engine_for: Callable[[Any], Engine] | None = None
) -> list[Log]:
    """Answer and score everything that a configuration asks for and that is not stored; return the logs.

    Args:
        config: What to run.
        reporter: Shows the progress.
        engine_for: Opens the engine of a model; by default the configured one.
    """
    reporter = reporter or Reporter()
    engine_for = engine_for or (lambda model: open_engine(config.engine, model, **config.engine_options))
    config.check()
    if config.needs_nltk_data:
        require_data()  # before anything is downloaded, generated or answered
    out = Path(config.out)
    check_layout(out)
    images: dict[Path, tuple[str, str]] = {}  # each image is read once per run
    questions = [read_questions(benchmark, config, images, reporter) for benchmark in config.benchmarks]
    make_folder(out)
    with ExitStack() as stack:
        tasks = []
        for name, model in config.models.items():
            engine = engine_for(model)
            stack.callback(engine.close)
            rows, asked_here = _rows(config, name), questions
            if config.only_visual:
                asked_here = [_only_visual(config, name, engine, asked, stack, reporter) for asked in questions]
            tasks += [task for asked in asked_here for task in _tasks(config, engine, asked, rows, stack)]
        answers = sum(len(task.questions.items) for task in tasks)
        missing = sum(len(task.log.missing(task.questions.items)) for task in tasks)
        reporter.plan(len(tasks), answers, answers - missing)
        for task, following in zip(tasks, [*tasks[1:], None], strict=True):
            try:
                answer(task, config.batch_size, reporter)
            except RevisitError:
                task.log.discard_if_empty()  # a wrong setting does not leave an unfinished combination
                raise
            task.log.close()
            if following and following.engine is not task.engine:
                task.engine.close()  # makes room for the next model
    write_results(out, read_logs(out))
    return [task.log for task in tasks]


def _tasks(
    config: EvalConfig, engine: Engine, asked: Questions, rows: Sequence[tuple[Method, str]], stack: ExitStack
) -> list[Task]:
    """Open a log for every row (method and control) and seed; all of them are on disk before the first answer."""
    about, decoding = engine.about(), config.decoding_for(asked.benchmark)
    batching = engine.batching(config.batch_size, asked.items)
    hashes = {item.id: item.hash for item in asked.items}
    request = {"data": str(asked.folder), "limit": config.limit_of(asked.benchmark.name), "left_out": asked.left_out}
    subset, tasks = ONLY_VISUAL if asked.left_out else "", []
    changed = {name: replace(asked, items=controlled(asked.items, name)) for _, name in rows if name}
    for method, control in rows:
        given = changed.get(control, asked)
        for seed in config.all_seeds:
            spec = Spec.of(about, method, asked.benchmark, decoding, seed, batching, control, subset)
            log = Log.open(Path(config.out), spec)
            stack.callback(log.close)
            log.begin(new_request(hashes, batch_size=config.batch_size, **request))  # its time orders the logs
            tasks.append(Task(log, engine, method, given, decoding, seed))
    return tasks


def _only_visual(
    config: EvalConfig, model: str, engine: Engine, asked: Questions, stack: ExitStack, reporter: Reporter
) -> Questions:
    """Leave out the items that plain decoding answers correctly without the image, under the first seed."""
    greedy = next(method for method in config.methods_for(model) if method.name == "greedy")
    task = _tasks(config.replace(seeds=config.all_seeds[:1]), engine, asked, [(greedy, NO_IMAGE)], stack)[0]
    answer(task, config.batch_size, reporter)
    task.log.close()
    scores, kept = task.log.scores, []
    assert scores is not None
    for item in asked.items:
        scored, wrong = scores.verdict(item.id)
        if not scored:
            raise RevisitError(
                f"--only-visual needs items that are scored one by one, unlike {asked.benchmark.title}'s."
            )
        kept += [item] if wrong else []
    if not kept:
        raise RevisitError(f"{task.log.title}: all items are answered correctly, so no visual item is left.")
    return replace(asked, items=kept, left_out=len(asked.items) - len(kept))


def _rows(config: EvalConfig, model: str) -> list[tuple[Method, str]]:
    """Return the methods for a model, and after them plain decoding under each control."""
    methods = config.methods_for(model)
    greedy = next((method for method in methods if method.name == "greedy"), None)
    controls = [(greedy, control) for control in CONTROLS] if config.controls and greedy else []
    return [*((method, "") for method in methods), *controls]


def answer(task: Task, batch_size: int, reporter: Reporter) -> None:
    """Generate what a log lacks, then score it."""
    log, asked = task.log, task.questions
    if log.damaged:
        reporter.note(f"{log.path}: skipped {log.damaged} damaged lines; answers that are missing are generated again.")
    missing = {item.id for item in log.missing(asked.items)}
    reporter.start(log.title, len(asked.items), len(asked.items) - len(missing))
    batches = [batch for batch in _batches(asked.items, batch_size) if any(item.id in missing for item in batch)]
    if batches:
        images = {item.id: tuple(_relative(path, asked.folder) for path in item.images) for item in asked.items}
        for found in task.engine.stream(task.method, task.decoding, task.seed, batches):
            reporter.advance(log.append(a.model_copy(update={"images": images[a.id]}) for a in found))
    log.score(asked.benchmark, asked.items)


def _batches(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Cut all items into batches of similar prompt length, longest first, so that a run that lacks memory fails early."""
    # Images make a prompt longer than its text. The sort is stable, so ties keep the benchmark's order.
    ordered = sorted(items, key=lambda item: -(len(item.prompt) + 1000 * len(item.images)))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _relative(path: Path, folder: Path) -> str:
    return path_within(folder, path).relative_to(path_within(folder, "x").parent).as_posix()


# -- items ----------------------------------------------------------------------------------------------------------


def read_questions(
    benchmark: Benchmark, config: EvalConfig, images: dict[Path, tuple[str, str]], reporter: Reporter
) -> Questions:
    """Read the first items of a benchmark and their images; raise RevisitError if one cannot be read."""
    folder = config.folders[benchmark.name]
    items = benchmark.load(folder)[: config.limit_of(benchmark.name)]
    if not items:
        raise RevisitError(f"Benchmark {benchmark.name!r} has no items in {folder}.")
    if repeated := [id for id, count in Counter(item.id for item in items).items() if count > 1]:
        raise RevisitError(f"Benchmark {benchmark.name!r} has two items with the id {repeated[0]!r} in {folder}.")
    reporter.note(f"{benchmark.name}: {len(items)} items from {folder}")
    own = dict.fromkeys(path for item in items for path in item.images)
    new = [path for path in own if path not in images]
    with ThreadPoolExecutor(4) as pool:
        images.update(zip(new, pool.map(lambda path: _checksum(path, folder), new), strict=True))
    if unread := [f"{path} ({images[path][1].rstrip('.')})" for path in own if images[path][1]]:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        raise RevisitError(
            f"{len(unread)} image{'s' * (len(unread) > 1)} of {benchmark.name} cannot be read: {'; '.join(unread[:5])}{more}. "
            "Fix the files and rerun the command."
        )
    hashed = [replace(i, hash=item_hash(i.prompt, [images[path][0] for path in i.images])) for i in items]
    return Questions(benchmark, folder, hashed)


def _checksum(path: Path, folder: Path) -> tuple[str, str]:
    """Return the hash of an image, which must be a file below the data folder, and why it cannot be read."""
    from revisit.models.images import MAX_BYTES, read_image  # Pillow is slow to import

    try:
        content = read_file(path_within(folder, path), MAX_BYTES)
        read_image(content, repr(path.name))
    except OSError as error:
        return "", error.strerror or str(error)
    except Exception as error:  # Pillow has no common error for broken files
        return "", str(error) or type(error).__name__
    return hashlib.sha256(content).hexdigest(), ""
