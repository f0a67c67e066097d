"""`revisit demo`: describe an image with and without ReVisiT, on an embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from revisit.models import DESCRIBE

if TYPE_CHECKING:
    from PIL.Image import Image


def demo(
    output: Path = typer.Option(Path("out"), "--out", "-o", help="Folder for the image and the page."),
    model: Literal["tiny", "photo"] = typer.Option("tiny", "--model", "-m", help="'photo' is for photographs."),
) -> None:
    """Describe an image with and without ReVisiT, on an embedded model; nothing is downloaded.

    The image is an "unusual" scene: the objects most typical of its place are replaced by others, so the model's expectations
    mislead it. It is the first such scene in which ReVisiT corrects a mistake and the selected patch is on the object (chosen
    by tools/samples.py). With --model photo it is the CC0 photograph of scikit-image that shows
    the most of CHAIR's objects: a cup of coffee.
    """
    from rich.console import Console

    from revisit import ask
    from revisit.eval.report.document import Cell, Table
    from revisit.eval.report.terminal import print_table
    from revisit.explain import page
    from revisit.explain.files import make_folder
    from revisit.models import photo

    image, nouns, place = _photo() if model == photo.NAME else _sample()
    image.save(make_folder(output) / "demo.png")
    answer = ask(model, image, compare_with="greedy", objects=nouns, max_new_tokens=128)
    decode = answer.decode
    console = Console()
    console.print(f"\nThe image ({output / 'demo.png'}) shows: [bold]{', '.join(nouns)}[/] (place: {place}).\n")
    rows = [(Cell(a.name, 1, a.settings), a.text) for a in reversed(decode.answers)]
    print_table(Table(("decoding", f"“{DESCRIBE}”"), rows, "", left=2), console)
    for step, token, other in answer.changed:
        console.print(f"Step {step}: [bold]{token.strip()}[/] instead of {other.strip()}")
    written = page.write(output / "demo.html", decode, title="ReVisiT demo")
    console.print(
        f"\nOpen [bold]{written}[/] in a browser to see which patch was selected at each token.", soft_wrap=True
    )
    other = photo.NAME if model == photo.NAME else "HuggingFaceTB/SmolVLM-256M-Instruct (0.5 GB)"
    console.print(f"Next, on an image of your own: revisit generate PHOTO --model {other}", soft_wrap=True)


def _photo() -> tuple[Image, tuple[str, ...], str]:
    from PIL import Image

    from revisit.models.photo import find_file

    with Image.open(find_file("skimage", "data/coffee.png")) as image:
        return image.convert("RGB"), ("cup", "spoon", "dining table"), "table"


def _sample() -> tuple[Image, tuple[str, ...], str]:
    from revisit.embedded.samples import sample

    shipped = sample("demo")
    return shipped.image(), shipped.nouns, shipped.place
