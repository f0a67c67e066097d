"""`revisit data get`: download a benchmark's data from its authors' servers or the Hub."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.errors import RevisitError, need
from revisit.registry import parse_assignments


def get(
    benchmark: str = typer.Argument(help="Name of a benchmark (see `revisit benchmarks`), or nltk."),
    folder: Path = typer.Argument(None, metavar="DIR", help="New folder for the data; optional for nltk."),
    source: str = typer.Option(None, "--from", help="Another Hub dataset (OWNER/NAME), or a folder with its files."),
    limit: int = typer.Option(None, min=1, help="Download only this many items."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Option of the benchmark. Repeatable."),
) -> None:
    """Download the questions, annotations and images of a benchmark.

    The folder appears once it is complete. Rerun the command to resume an interrupted download.

    Examples:

      revisit data get pope data/pope
      revisit data get chair data/coco --limit 100
      revisit data get mmmu data/mmmu --from downloads/MMMU
      revisit data get nltk
    """
    if benchmark == "nltk":
        from revisit.eval.benchmarks import language

        need("nltk")
        typer.echo(f"License of NLTK's data: {language.LICENSE}.", err=True)
        target = (folder or language.data_folder()).expanduser().resolve()
        typer.echo(f"{target}: NLTK's data for CHAIR and AMBER, by NLTK {language.get_data(target)}")
        if folder is not None:
            typer.echo(f"Use it with: export NLTK_DATA={quote(str(target))}")
        return
    from revisit.cli.progress import progress_bar
    from revisit.eval.benchmarks import find
    from revisit.eval.benchmarks.io import data

    known = find(benchmark)
    if folder is None:
        raise RevisitError(f"DIR is missing: revisit data get {benchmark} DIR.")
    typer.echo(f"License of {known.title}'s data: {known.license}.", err=True)
    with progress_bar() as bar:
        task = bar.add_task(benchmark, total=limit)
        options = parse_assignments(set_)
        summary = data.get(benchmark, folder, source, limit, lambda n: bar.update(task, completed=n), **options)
    typer.echo(f"{folder}: {summary['images']} images of {known.name} from {summary['source']}")
    typer.echo(f"Use it with: revisit eval --benchmark {known.name} --data {quote(f'{known.name}={folder}')}")
