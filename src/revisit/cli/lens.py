"""`revisit lens`: what the vision tokens say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from revisit.cli import options
from revisit.errors import RevisitError


def lens(
    images: list[str] = typer.Argument(None, help="Image files; they share one prompt."),
    words: str = typer.Option(None, help="Words to choose from, for example dog,cat,cup."),
    objects: bool = typer.Option(False, "--objects", help="Also read over the object words of CHAIR."),
    model: str = options.MODEL,
    layer: int = typer.Option(None, min=0, help="Layer to show; by default the last."),
    norm: Literal["none", "final"] = typer.Option(
        "none", help="'final' applies the decoder's last norm to the layers below it."
    ),
    top: int = typer.Option(5, min=1, help="Tokens to keep for each patch."),
    patches: int = typer.Option(20, min=1, help="Patches to list."),
    html: Path = typer.Option(None, help="Write a self-contained page: click a patch, move through the layers."),
    png: Path = typer.Option(None, help="Write one heat map per word (.png, .svg or .pdf)."),
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Show which words each image patch predicts through the model's LM head.

    Examples:

      revisit lens photo.jpg

      revisit lens photo.jpg --words dog,cat,cup --png maps.png --html lens.html
    """
    from revisit.models.images import open_image
    from revisit.pages.document import check_page

    if not images:
        raise RevisitError("No image was given; for example: revisit lens photo.jpg --words dog,cat,cup")
    sets: dict[str, list[str]] = {}
    if words is not None:
        sets["words"] = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
        if len(sets["words"]) < 2:
            raise RevisitError(f"--words needs at least two different words, separated by commas, not {words!r}.")
    if objects:
        from revisit.benchmarks.chair_words import WORDS

        sets["objects"] = sorted(WORDS)
    if png is not None and not sets:
        raise RevisitError("--png needs --words, for example --words dog,cat,cup.")
    if html is not None:
        check_page(html, images)
    pictures = [open_image(path) for path in images]

    from revisit import load
    from revisit.cli.tables import patches_table, print_unfamiliar, words_table
    from revisit.explain import figure, lens_page
    from revisit.report.terminal import print_table

    if png is not None:
        figure.check_path(png, images)
    from revisit.explain.lens import read_vision_tokens

    loaded, processor = load(model, trust_remote_code=trust_remote_code, allow_incomplete=allow_incomplete)
    seen = read_vision_tokens(loaded, processor, pictures, sets, norm=norm, best=top, model_name=model)
    print_unfamiliar([images[number] for number in seen.unfamiliar])
    at = len(seen.layers) - 1 if layer is None else layer
    if at >= len(seen.layers):
        raise RevisitError(
            f"There is no layer {layer}: this model's hidden states are numbered 0 to {seen.layers[-1]}."
        )
    for number, reading in enumerate(seen.readings):
        if reading.maps is not None:
            print_table(words_table(seen, number, at))
        elif not sets:
            print_table(patches_table(seen, number, at, patches))
    for note in [*seen.notes, *([f"Patches cannot be shown: {seen.layout.reason}"] if seen.layout.reason else [])]:
        print(note)
    if png is not None:
        print(f"Wrote {figure.save(figure.lens_figure(seen, 1, at), png)}")
    if html is not None:
        print(f"Wrote {lens_page.write(html, seen)}")
