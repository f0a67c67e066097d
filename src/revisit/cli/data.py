"""`revisit data get`: a benchmark's data from a hub dataset, as the official local files."""

from __future__ import annotations

from pathlib import Path

import typer


def get(
    benchmark: str = typer.Argument(help="pope, hallusionbench, vqav2, mmmu, mme or llava_bench."),
    folder: Path = typer.Argument(metavar="DIR", help="A new folder."),
    source: str = typer.Option(
        None, "--from", help="Another hub dataset OWNER/NAME with the same columns, or a folder with a dataset's files."
    ),
    split: str = typer.Option(None, help="Another split; several are separated by commas."),
    limit: int = typer.Option(None, min=1, help="Only the first rows; nothing after them is downloaded."),
) -> None:
    """Fetch a benchmark from the hub into a folder for `revisit eval --data`.

    The folder appears when it is complete; killed before that, the same command starts again.

    Examples:

      revisit data get pope data/pope

      revisit data get vqav2 data/vqav2 --limit 500

      revisit data get mmmu data/mmmu --from downloads/MMMU
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from revisit.benchmarks.io import hub

    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed} rows"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(benchmark, total=limit)
        about = hub.get(benchmark, folder, source, split, limit, lambda done: bar.update(task, completed=done))
    revision = f" at {about['revision'][:12]}" if about["revision"] else ""
    typer.echo(
        f"{folder}: {about['items']} items and {about['pictures']} pictures of {about['benchmark']} "
        f"from {about['source']}{revision} ({', '.join(about['splits'])})"
    )
    typer.echo(f"Use it with: revisit eval --benchmark {about['benchmark']} --data {about['benchmark']}={folder}")


def register(app: typer.Typer) -> None:
    """Add `data get`."""
    group = typer.Typer(help="Benchmark data from the hub.", no_args_is_help=True)
    group.command("get")(get)
    app.add_typer(group, name="data")

    @group.callback()
    def _() -> None:
        """Benchmark data from the hub."""
