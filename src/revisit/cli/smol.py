"""`revisit smol`: train the second embedded model's projector and adapter."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options


def train(
    folder: Path = typer.Argument(help="Where checkpoints and the log are kept; run again to resume."),
    out: Path = typer.Option(None, help="Where to write the finished model; by default FOLDER/model."),
    steps: int = typer.Option(None, min=1, help="At most this many steps a stage, for a trial."),
    stage: list[str] = typer.Option(None, help="Only these stages (projector, adapter), in this order."),
    seed: int = typer.Option(7, callback=options.a_seed, help="Seed of everything."),
    threads: int = typer.Option(None, min=1, help="CPU threads; by default torch's choice."),
) -> None:
    """Train a projector and a low-rank adapter between the embedded vision tower and SmolLM2-135M-Instruct.

    What was trained goes to FOLDER/weights; the whole model, with the language model in it, to --out, where every command
    can load it.

    Example: revisit smol train work --out my-smol && revisit tiny evaluate --model my-smol
    """
    from dataclasses import replace

    import torch

    from revisit.cli.progress import stage_bars
    from revisit.models.config import embedded_folder
    from revisit.models.smol import OWN, assemble, language_file
    from revisit.smol.train import STAGES, Recipe
    from revisit.smol.train import train as run

    if threads:
        torch.set_num_threads(threads)
    recipe = replace(Recipe(), seed=seed)
    if steps:
        recipe = recipe.shortened(steps)
    stages = tuple(stage or STAGES)
    weights = folder / "weights" if stages[-1] == STAGES[-1] else None
    with stage_bars() as show:
        for name in run(recipe, folder, weights, stages, progress=show):
            typer.echo(f"{name}: done")
    if weights is not None:
        target = out or folder / "model"
        assemble(language_file(), weights / OWN, embedded_folder(), target)
        typer.echo(f"Model in {target}")


def register(app: typer.Typer) -> None:
    """Add `smol train`."""
    group = typer.Typer(help="The second embedded model: train its projector and adapter.", no_args_is_help=True)
    group.command("train")(train)
    app.add_typer(group, name="smol")
