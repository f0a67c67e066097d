"""`revisit scenes build`: held-out scenes as benchmarks in the official file formats."""

from __future__ import annotations

from pathlib import Path

import typer


def build(
    folder: Path = typer.Argument(help="A new folder."),
    split: str = typer.Option("usual", help="usual, unusual (contradicts the habits of places) or flat (no habits)."),
    n: int = typer.Option(500, "--n", help="Number of pictures."),
    seed: int = typer.Option(0, help="Other seeds give other scenes."),
) -> None:
    """Write n held-out scenes with CHAIR, POPE, HallusionBench, VQAv2 and MMMU files.

    Example: revisit scenes build scenes/unusual --split unusual --n 500 --seed 1
    """
    from rich.progress import track

    from revisit.tiny.build import build as write

    steps = iter(track(range(n), description="scenes", transient=True)) if n > 0 else iter([])
    write(folder, split, n, seed, progress=lambda done, total: (next(steps, None), None)[1])
    typer.echo(f"{n} {split} scenes (seed {seed}) in {folder}")


def register(app: typer.Typer) -> None:
    """Add `scenes build`."""
    group = typer.Typer(help="Generated pictures with known contents.", no_args_is_help=True)
    group.command("build")(build)
    app.add_typer(group, name="scenes")

    @group.callback()
    def _() -> None:
        """Generated pictures with known contents."""
