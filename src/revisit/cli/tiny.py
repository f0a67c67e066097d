"""`revisit tiny`: train the embedded model, and measure it."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options


def train(
    folder: Path = typer.Argument(
        help="Where checkpoints, rendered pictures and the log are kept; run again to resume."
    ),
    out: Path = typer.Option(None, help="Where to write the finished model; by default FOLDER/model."),
    steps: int = typer.Option(None, help="At most this many steps a stage, for a trial."),
    stage: list[str] = typer.Option(None, help="Only these stages (vision, language, projector, tune), in this order."),
    seed: int = typer.Option(0, callback=options.a_seed, help="Seed of everything."),
    size: str = typer.Option("base", help="base (what ships) or small (under half of its parameters)."),
    threads: int = typer.Option(None, help="CPU threads; by default torch's choice."),
) -> None:
    """Train the embedded model from scratch: vision tower, language model, projector, light tuning.

    The first two stages are independent and may run side by side:
    `revisit tiny train work --stage vision` and `revisit tiny train work --stage language`.

    Example: revisit tiny train work --out my-tiny
    """
    import torch

    from revisit.cli.progress import stage_bars
    from revisit.errors import unknown
    from revisit.tiny.model import SIZES
    from revisit.tiny.train import STAGES, Recipe
    from revisit.tiny.train import train as run

    if threads:
        torch.set_num_threads(threads)
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    recipe = Recipe(seed=seed, shape=SIZES[size])
    if steps:
        recipe = recipe.shortened(steps)
    stages = tuple(stage or STAGES)
    target = (out or folder / "model") if stages[-1] == STAGES[-1] else None
    with stage_bars() as show:
        for name in run(recipe, folder, target, stages, progress=show):
            typer.echo(f"{name}: done")
    if target is not None:
        typer.echo(f"Model in {target}")


def evaluate(
    model: str = typer.Option("tiny", help="The embedded model, or the folder of another one trained the same way."),
    out: Path = typer.Option(Path("tiny-evaluation"), help="Folder for report.json and report.md."),
    usual: int = typer.Option(500, help="Scenes of the usual split."),
    validation: int = typer.Option(400, help="Unusual scenes on which the settings are chosen."),
    test: int = typer.Option(1000, help="Other unusual scenes on which they are reported."),
    grid: bool = typer.Option(False, "--grid", help="Report every combination of settings on the test scenes too."),
    batch_size: int = typer.Option(32, min=1, help="Captions generated at once."),
    workers: int = typer.Option(1, help="Processes that decode side by side."),
    seed: int = typer.Option(
        101, callback=options.a_seed, help="Of the usual scenes; validation and test have the two after it."
    ),
    threads: int = typer.Option(None, help="CPU threads; by default torch's choice."),
) -> None:
    """Measure a model: quality, the lens, and ReVisiT with settings chosen on one split and reported on another.

    Example: revisit tiny evaluate --out report
    """
    import torch

    from revisit.studies.embedded import Plan, report

    if threads:
        torch.set_num_threads(threads)
    plan = Plan(usual, validation, test, batch_size, workers, seed=seed, grid_on_test=grid)
    typer.echo(report(model, plan, out))


def register(app: typer.Typer) -> None:
    """Add `tiny train` and `tiny evaluate`."""
    group = typer.Typer(help="The embedded model: train it, measure it.", no_args_is_help=True)
    group.command("train")(train)
    group.command("evaluate")(evaluate)
    app.add_typer(group, name="tiny")
