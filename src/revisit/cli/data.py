"""`revisit data get`: a benchmark's data, from its authors' servers or a Hub dataset, as the official local files."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.errors import RevisitError, need


def get(
    benchmark: str = typer.Argument(help="A name from `revisit benchmarks`; or nltk."),
    folder: Path = typer.Argument(None, metavar="DIR", help="A new folder; not needed for nltk."),
    source: str = typer.Option(
        None, "--from", help="For benchmarks on the Hub: another dataset OWNER/NAME, or a folder with its files."
    ),
    limit: int = typer.Option(None, min=1, help="Download only the first items."),
    set_: list[str] = typer.Option([], "--set", help="Option of the benchmark, key=value."),
) -> None:
    """Download a benchmark's data for `revisit eval --data`: questions, annotations, and the images they need.

    The folder appears when it is complete. Rerun the command to resume an interrupted download.

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
        place = (folder or language.data_folder()).expanduser().resolve()
        typer.echo(f"{place}: NLTK's data for CHAIR and AMBER, by NLTK {language.get_data(place)}")
        if folder is not None:
            typer.echo(f"Use it with: export NLTK_DATA={quote(str(place))}")
        return
    from revisit.cli.progress import progress_bar
    from revisit.eval.benchmarks import find
    from revisit.eval.benchmarks.io import data
    from revisit.registry import parse_assignments

    known = find(benchmark)
    if folder is None:
        raise RevisitError(f"DIR is missing: revisit data get {benchmark} DIR.")
    typer.echo(f"License of {known.title}'s data: {known.license}.", err=True)
    with progress_bar() as bar:
        task = bar.add_task(benchmark, total=limit)
        options = parse_assignments(set_)
        about = data.get(benchmark, folder, source, limit, lambda n: bar.update(task, completed=n), **options)
    typer.echo(f"{folder}: {about['images']} images of {known.name} from {about['source']}")
    typer.echo(f"Use it with: revisit eval --benchmark {known.name} --data {quote(f'{known.name}={folder}')}")
