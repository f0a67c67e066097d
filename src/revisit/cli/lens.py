"""`revisit lens`: print the words that vision tokens predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.errors import RevisitError
from revisit.eval.report.document import Table
from revisit.eval.report.terminal import print_table
from revisit.pages.document import check_page

if TYPE_CHECKING:
    from revisit.explain.lens import Lens, Reading
    from revisit.models.geometry import Layout


def lens(
    images: list[str] = typer.Argument(None, help="Images or videos; several are put into one prompt."),
    words: str = typer.Option(None, help="Compare only these words, for example dog,cat,cup."),
    model: str = options.MODEL,
    layer: int = typer.Option(None, min=0, help="Layer to print; by default the last one."),
    top: int = typer.Option(5, min=1, help="Number of predicted tokens per patch."),
    frames: int = options.FRAMES,
    fps: float = options.FPS,
    html: Path = typer.Option(None, help="Write an interactive HTML page with all patches and layers to this file."),
    any_image: bool = options.ANY_IMAGE,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Show which words each image patch predicts through the model's LM head.

    Examples:

      revisit lens photo.jpg --model photo
      revisit lens photo.jpg --model photo --words dog,cat,cup --html lens.html
    """
    from revisit.models.reader import open_visuals
    from revisit.video.sampling import Sampling

    if not images:
        raise RevisitError("No image was given; for example: revisit lens photo.jpg --words dog,cat,cup")
    compared = list(dict.fromkeys(word.strip() for word in (words or "").split(",") if word.strip()))
    if words is not None and len(compared) < 2:
        raise RevisitError(f"--words needs at least two different words, separated by commas, not {words!r}.")
    if html is not None:
        check_page(html, images)
    opened = open_visuals((images, None), Sampling(frames, fps))

    from revisit.explain.lens import lens as run_lens

    pair = options.load_for_image(
        model,
        opened[0],
        images[0],
        any_image=any_image,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_incomplete=allow_incomplete,
    )
    result = run_lens(pair, opened, compared, top=top)
    index = len(result.layers) - 1 if layer is None else layer
    if index >= len(result.layers):
        raise RevisitError(
            f"There is no layer {layer}; this model's hidden states are numbered 0 to {result.layers[-1]}."
        )
    print_table((words_table if compared else patches_table)(result, result.readings[-1], index))
    for note in result.notes:
        print(note)
    if result.layout.reason:
        print(f"Patches are not available: {result.layout.reason}")
    if html is not None:
        print(f"Wrote {result.save(html)}")


def _place(token: int, layout: Layout) -> str:
    """Return the row and column of a vision token's patch, from 1, or its number if they are unknown."""
    region = layout.region(token)
    if region is None:
        return f"#{token}"
    image = f"image {region.image + 1} " if len(layout.sizes) > 1 else ""
    image = image if region.time is None else f"{region.time:.2f} s "
    view = "" if region.view == "image" else f"{region.view} "
    return f"{image}{view}{region.row + 1},{region.column + 1}"


def words_table(lens: Lens, reading: Reading, layer: int) -> Table:
    """List the words with their shares at a layer, and the patch with the highest share of each."""
    assert reading.maps is not None
    maps = reading.maps[layer]  # (tokens, words)
    winners, rows = maps.argmax(-1), []
    for number in sorted(range(len(reading.entries)), key=lambda n: -float(maps[:, n].max())):
        best = int(maps[:, number].argmax())
        share, mean = (f"{float(value):.1%}" for value in (maps[best, number], maps[:, number].mean()))
        first = str(int((winners == number).sum()))
        rows.append((reading.entries[number], share, _place(best, lens.layout), mean, first))
    heads = ("word", "highest", "in patch (row, column)", "mean", "patches where it ranks first")
    about = "The shares of a patch add up to 100 % among these words only."
    return Table(heads, rows, f"{reading.name}, layer {lens.layers[layer]}. {about}")


def patches_table(lens: Lens, reading: Reading, layer: int) -> Table:
    """List the predictions of the 20 patches with the most probable words at a layer."""
    from revisit.models.tokens import printable

    order = reading.probabilities[layer, :, 0].argsort(descending=True)[:20].tolist()
    shown = f"the {len(order)} of {lens.layout.tokens} patches with the most probable word"
    title = f"{reading.name}, layer {lens.layers[layer]}: {shown}"
    rows = []
    for token in order:
        likeliest = zip(reading.top[layer, token], reading.probabilities[layer, token], strict=True)
        words = "  ".join(f"{printable(reading.entries[int(n)])} {float(p):.1%}" for n, p in likeliest)
        rows.append((_place(token, lens.layout), words))
    return Table(("patch (row, column)", "predicts"), rows, title, left=2)
