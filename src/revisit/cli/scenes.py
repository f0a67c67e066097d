"""`revisit scenes build`: held-out scenes as benchmarks in the official file formats."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options


def build(
    folder: Path = typer.Argument(help="A new folder."),
    split: str = typer.Option(
        "usual", help="usual (objects that belong to the place), unusual (others instead) or flat (any objects)."
    ),
    limit: int = typer.Option(500, min=1, help="Number of pictures."),
    seed: int = typer.Option(0, callback=options.a_seed, help="Other seeds give other scenes."),
) -> None:
    """Write held-out scenes with CHAIR, POPE, HallusionBench, VQAv2 and MMMU files.

    Example: revisit scenes build scenes/unusual --split unusual --limit 500 --seed 1
    """
    from revisit.cli.progress import progress_bar
    from revisit.embedded.build import build as write

    with progress_bar() as bar:
        task = bar.add_task("scenes", total=limit)
        write(folder, split, limit, seed, progress=lambda done, total: bar.update(task, completed=done))
    typer.echo(f"{limit} {split} scenes (seed {seed}) in {folder}")
