"""`revisit demo`: describe a sample image with and without ReVisiT."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

import typer

from revisit.io.files import inside, make_folder, write_bytes
from revisit.models import DESCRIBE, photo


def demo(
    output: Path = typer.Option(Path("out"), "--out", "-o", help="Folder for the image and the page."),
    model: Literal["tiny", "photo"] = typer.Option(
        "tiny", "--model", "-m", help="'tiny' describes a generated scene, 'photo' a photograph."
    ),
) -> None:
    """Describe a sample image with and without ReVisiT; nothing is downloaded.

    The scene is "unusual": other objects replace those typical of the place, so the model's expectations mislead it. It is the
    first such scene in which ReVisiT corrects a mistake and selects a patch on the object (see tools/samples.py). The photograph
    is the CC0 image in scikit-image with the most of CHAIR's objects: a cup of coffee.
    """
    folder = make_folder(output)  # before torch is imported, which takes seconds

    from PIL import Image
    from rich.console import Console
    from rich.text import Text

    from revisit import ask
    from revisit.embedded.samples import sample

    nouns: tuple[str, ...]
    if model == photo.NAME:
        with Image.open(photo.find_file("skimage", "data/coffee.png")) as file:
            image, nouns, place = file.convert("RGB"), ("cup", "spoon", "dining table"), "table"
    else:
        shipped = sample("demo")
        image, nouns, place = shipped.image(), shipped.nouns, shipped.place
    image.save(stored := io.BytesIO(), "PNG")
    write_bytes(inside(folder, "demo.png"), stored.getvalue())
    answer = ask(model, image, compare_with="greedy", objects=nouns, max_new_tokens=128)
    console = Console(highlight=False)
    console.print(f"\nThe image ({output / 'demo.png'}) shows: [bold]{', '.join(nouns)}[/] (place: {place}).\n")
    console.print(f"“{DESCRIBE}”\n")
    absent = [other.strip() for *_, other in answer.changed if other.strip() not in nouns]
    for told in reversed(answer.page.answers):
        text = Text.assemble((f"{told.trace.label}: ", "bold"), told.text)
        text.highlight_words(absent, "red")
        console.print(text)
    console.print()
    for step, token, other in answer.changed:
        console.print(f"Step {step}: [bold]{token.strip()}[/] instead of {other.strip()}")
    written = answer.page.write(inside(folder, "demo.html"), title="ReVisiT demo")
    console.print(
        f"\nOpen [bold]{written}[/] in a browser to see which patch was selected at each token.", soft_wrap=True
    )
    other = photo.NAME if model == photo.NAME else "HuggingFaceTB/SmolVLM-256M-Instruct (0.5 GB)"
    console.print(f"Next, try your own image: revisit generate PHOTO --model {other}", soft_wrap=True)
