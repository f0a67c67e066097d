"""`revisit export`: decoding methods as folders that other programs load."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options
from revisit.cli.generate import chosen_method


def custom_generate(
    folder: Path = typer.Argument(..., help="Where to write; a model's own folder makes the method its default."),
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace files that are there already."),
) -> None:
    """For transformers: model.generate(..., custom_generate=FOLDER, trust_remote_code=True).

    Example:

      revisit export custom-generate my-method --set alpha=1e-3
    """
    from revisit import methods
    from revisit.integrations.custom_generate import write

    name, settings = chosen_method(method, set_)
    for path in write(folder, methods.get(name, **settings), settings=settings, overwrite=overwrite):
        print(path)
