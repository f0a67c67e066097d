"""Train and measure the embedded models: `python -m training --help`, from the root of a clone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import typer
from rich.progress import TaskID

from revisit.cli import options
from revisit.cli.main import main
from revisit.cli.progress import progress_bar
from revisit.errors import unknown
from revisit.eval.benchmarks.language import require_data
from revisit.models.photo import LANGUAGE, OWN, TOWER, assemble
from training import card, fusion
from training.photo import study
from training.photo import train as photo_train
from training.photo.benchmark import write_benchmark
from training.photo.data import Labels, Photos, build_lists, read_captions, read_held_out
from training.tiny import train as tiny_train
from training.tiny.model import SIZES

app = typer.Typer(
    help="Train and measure the embedded models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

WORK = typer.Argument(help="Folder for checkpoints and the log; rerun the command to resume.")
OUT = typer.Option(None, help="Folder for the finished model; by default FOLDER/model.")
STEPS = typer.Option(None, min=1, help="At most this many steps per stage, for a trial run.")
THREADS = typer.Option(None, min=1, help="Number of CPU threads; by default torch's choice.")


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int, float], None]]:
    """Yield a function that shows the progress of a training stage: its name, steps done, all steps, and the loss."""
    bars: dict[str, TaskID] = {}
    with progress_bar() as progress:

        def show(name: str, done: int, total: int, loss: float) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
            progress.update(bars[name], completed=done, description=f"{name} loss {loss:.3f}")

        yield show


@app.command("tiny")
def train_tiny(
    folder: Path = WORK,
    out: Path = OUT,
    steps: int = STEPS,
    stage: list[str] = typer.Option(None, help="Only these stages (vision, language, projector, tune), in this order."),
    seed: int = typer.Option(0, callback=options.validate_seed, help="Random seed."),
    size: str = typer.Option("base", help="base (ships with the package) or small (less than half of its parameters)."),
    threads: int = THREADS,
) -> None:
    """Train `tiny` from scratch: vision tower, language model, projector, light tuning.

    The first two stages are independent and may run side by side:
    `python -m training tiny work --stage vision` and `python -m training tiny work --stage language`.
    """
    if threads:
        torch.set_num_threads(threads)
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    recipe = tiny_train.Recipe(seed=seed, shape=SIZES[size])
    if steps:
        recipe = recipe.shortened(steps)
    stages = tuple(stage or tiny_train.STAGES)
    target = (out or folder / "model") if stages[-1] == tiny_train.STAGES[-1] else None
    with stage_bars() as show:
        for name in tiny_train.train(recipe, folder, target, stages, progress=show):
            typer.echo(f"{name}: done")
    if target is not None:
        typer.echo(f"Model in {target}")


PHOTOS = typer.Option(help="Git directory with COCO's train2017 photos, named by their ids (a bare clone will do).")
LABELS = typer.Option(help="CHAIR's objects of train2014 and val2014: categories, and indices into them by photo.")
CAPTIONS = typer.Option(help="Human captions: records with a file name and captions.")
HELD_OUT = typer.Option(help="Files of benchmarks that name their COCO photos; none of these is trained on.")


@app.command("photo")
def train_photo(
    folder: Path = WORK,
    photos: Path = PHOTOS,
    labels: Path = LABELS,
    captions: list[Path] = CAPTIONS,
    held_out: list[Path] = HELD_OUT,
    out: Path = OUT,
    steps: int = STEPS,
    stage: list[str] = typer.Option(
        None, help="Only these stages (features, words, projector, adapter), in this order."
    ),
    seed: int = typer.Option(30, callback=options.validate_seed, help="Random seed."),
    vision_loss: float = typer.Option(
        0.1, min=0, help="Weight of the loss that makes vision tokens predict the words of their patches."
    ),
    start: Path = typer.Option(None, help="Trained weights from which the stage adapter starts."),
    threads: int = THREADS,
) -> None:
    """Train the parts that `photo` adds to its vision tower and to SmolLM2-135M-Instruct, on photographs.

    The trained parts go to FOLDER/weights; the whole model, with the pretrained parts in it, to --out.
    """
    if threads:
        torch.set_num_threads(threads)
    tower, language = (part.find() for part in (TOWER, LANGUAGE))
    TOWER.check(tower)
    LANGUAGE.check(language)
    require_data()
    recipe = replace(photo_train.Recipe(), seed=seed, vision_loss=vision_loss)
    if steps:
        recipe = recipe.shortened(steps)
    found, objects, written = Photos(photos), Labels.read(labels), read_captions(captions)
    lists = build_lists(found.ids(), objects, written, read_held_out(held_out), seed)
    stages = tuple(stage or photo_train.STAGES)
    weights = folder / "weights" if stages[-1] == photo_train.STAGES[-1] else None
    sources = photo_train.Sources(found, objects, written, lists, tower, language, start)
    with stage_bars() as show:
        for name in photo_train.train(recipe, folder, sources, weights, stages, progress=show):
            typer.echo(f"{name}: done")
    if weights is not None:
        target = out or folder / "model"
        assemble(language, tower, weights / OWN, target)
        typer.echo(f"Model in {target}")


@app.command("photo-benchmark")
def photo_benchmark(
    folder: Path = typer.Argument(help="Folder to write, for `revisit eval --data FOLDER`."),
    part: str = typer.Option("test", help="Photos that no stage trains on: validation or test."),
    first: int = typer.Option(0, min=0, help="Skip this many photos of the list."),
    count: int = typer.Option(300, min=1, help="Number of photos."),
    photos: Path = PHOTOS,
    labels: Path = LABELS,
    held_out: list[Path] = HELD_OUT,
    seed: int = typer.Option(30, callback=options.validate_seed, help="Seed of the lists and of the questions."),
) -> None:
    """Write held-out photos in the form of CHAIR's and POPE's data."""
    if part not in ("validation", "test"):
        raise unknown("list of photos", part, ("validation", "test"))
    found, objects = Photos(photos), Labels.read(labels)
    lists = build_lists(found.ids(), objects, (), read_held_out(held_out), seed)
    chosen = getattr(lists, part)[first : first + count]
    write_benchmark(folder, found, objects, chosen, seed)
    typer.echo(f"{len(chosen)} photos in {folder}")


@app.command("photo-choose")
def photo_choose(
    runs: list[Path] = typer.Argument(help="Runs of `revisit eval` with chair and pope on validation photos."),
) -> None:
    """Apply the rule that chooses a decoding: the best distinct F1 that costs no precision, no right answers and no repetition."""
    require_data()
    typer.echo(study.report(runs))


@app.command("card")
def measure(
    model: str = typer.Option("tiny", help="An embedded model, or the folder of one trained the same way."),
    out: Path = typer.Option(Path("runs/card"), help="Folder for report.json and report.md."),
    usual: int = typer.Option(500, min=1, help="Scenes of the usual split."),
    validation: int = typer.Option(400, min=1, help="Unusual scenes on which the settings are chosen."),
    test: int = typer.Option(1000, min=1, help="Other unusual scenes on which they are reported."),
    grid: bool = typer.Option(False, "--grid", help="Report every combination of settings on the test scenes too."),
    batch_size: int = typer.Option(32, min=1, help="Batch size."),
    workers: int = typer.Option(1, min=1, help="Processes that decode side by side."),
    seed: int = typer.Option(
        101,
        callback=options.validate_seed,
        help="Seed of the usual scenes; validation and test use the two seeds after it.",
    ),
    threads: int = THREADS,
) -> None:
    """Measure a model for its card: quality, the lens, and ReVisiT with settings chosen on one split and tested on another."""
    if threads:
        torch.set_num_threads(threads)
    plan = card.Plan(usual, validation, test, batch_size, workers, seed=seed, grid_on_test=grid)
    typer.echo(card.report(model, plan, out))


@app.command("fusion")
def adaptive_fusion(
    part: str = typer.Argument(help="choose (on validation scenes) or test (the choice, on fresh scenes)."),
    model: str = options.MODEL,
    out: Path = typer.Option(Path("runs/fusion"), "--out", "-o", help="Folder for choice.json, test.json and tables."),
    validation: int = typer.Option(400, min=1, help="Unusual scenes on which a setting is chosen."),
    test: int = typer.Option(1000, min=1, help="Other unusual scenes on which it is measured."),
    usual: int = typer.Option(500, min=1, help="Usual scenes on which it is measured too."),
    seed: int = typer.Option(
        301,
        callback=options.validate_seed,
        help="Seed of the validation scenes; the test scenes use the two seeds after it.",
    ),
    workers: int = typer.Option(1, min=1, help="Processes that decode side by side."),
) -> None:
    """Choose a weight and a number of vision tokens for adaptive fusion by a fixed rule, then test the choice."""
    if part not in ("choose", "test"):
        raise unknown("part", part, ("choose", "test"))
    plan = fusion.Plan(model=model, validation=validation, test=test, usual=usual, seed=seed, workers=workers)
    typer.echo(fusion.report(part, plan, out))


if __name__ == "__main__":
    main(app)
