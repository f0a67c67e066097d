"""`revisit check`: check which words of a text are supported by its image."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from revisit.cli import options
from revisit.errors import Incomplete, RevisitError
from revisit.eval.report.document import Table
from revisit.eval.report.terminal import print_table
from revisit.pages.document import check_page

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.explain.captions import Caption
    from revisit.explain.check import Check
    from revisit.models.types import Model, Processor


def check(
    source: Path = typer.Argument(None, help="An image, or a file of texts (with --images)."),
    text: str = typer.Argument(None, help="Text about the image."),
    images: Path = typer.Option(None, help="Folder with the images of a file of texts."),
    output: Path = typer.Option(
        None, "--out", "-o", help="Folder for the results of a file of texts; rerun the command to resume."
    ),
    model: str = options.MODEL,
    prompt: str = typer.Option(None, "--prompt", "-p", help="Question that the text answers."),
    threshold: float = typer.Option(
        None, min=0, max=1, help="Flag words with less support than this; by default the model's threshold."
    ),
    words: str = typer.Option("objects", help="Words to check: objects, content, or a list like dog,cat,cup."),
    field: str = typer.Option(None, help="Field of the file that contains the text, if there are several candidates."),
    batch_size: int = typer.Option(8, min=1, help="Number of texts per forward pass."),
    calibrate: str = typer.Option(
        None,
        metavar="SOURCE",
        help="Measure how well the model can check, on images with known objects (a folder with COCO's annotations, or "
        "scenes:SPLIT:NUMBER:SEED), and print an entry for its generation_config.json.",
    ),
    html: Path = options.HTML,
    as_json: bool = options.JSON,
    quiet: bool = options.QUIET,
    any_image: bool = options.ANY_IMAGE,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Check which words of a text are supported by its image.

    A file of texts can have any layout that `revisit score chair` accepts. Its results are checks.jsonl, with one line per text,
    and index.html, which lists the texts with the least support first.

    Exit status: 0 if no word is flagged, 1 if a word is flagged, 2 for wrong input, 3 if there is no word to check or a text
    cannot be checked.

    Examples:

      revisit check photo.jpg "A dog on a couch." --model photo
      revisit check captions.jsonl --images val2014 --out checks --model llava-hf/llava-1.5-7b-hf
      revisit check --calibrate coco --model llava-hf/llava-1.5-7b-hf
    """
    loading: dict[str, Any] = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "allow_incomplete": allow_incomplete,
    }
    if calibrate is not None:
        others = (source, images, output, prompt, threshold, field, html)
        if as_json or any_image or words != "objects" or any(option is not None for option in others):
            raise RevisitError(
                "--calibrate measures the model: combine it with --batch-size, --quiet and the options that load a model only."
            )
        _calibrate(model, calibrate, batch_size, quiet, loading)
        return
    if source is None or (text is None and images is None):
        raise RevisitError(
            'Give an image and its text, or a file of texts with --images: revisit check photo.jpg "A dog."'
        )
    if not source.exists():
        raise RevisitError(f"There is no file {source}.")
    if text is not None and (images is not None or output is not None or field is not None):
        raise RevisitError("--images, --out and --field need a file of texts, not a single text.")
    if text is None and (html is not None or as_json or output is None or output.is_file()):
        raise RevisitError("A file of texts needs a folder for its results: use --out DIR, without --html and --json.")
    from revisit.explain.captions import read_captions
    from revisit.explain.checkable import need_words
    from revisit.models.images import open_image

    kind_or_list = words if words in ("objects", "content") else [word for word in words.split(",") if word.strip()]
    settings: dict[str, Any] = {"prompt": prompt, "threshold": threshold, "words": kind_or_list}
    if html is not None:
        check_page(html, [source])
    if text is not None:
        need_words(text)
        captions, first, image = [], source, open_image(source)
    else:
        captions = read_captions(source, images, field)
        first, image = _first_image(captions)

    from revisit.explain.check import check as check_one

    pair = options.load_for_image(model, image, str(first), any_image=any_image, **loading)
    if text is None:
        flagged = _check_file(pair, captions, output, settings, batch_size, quiet)
    else:
        flagged = _print_check(check_one(pair, image, text, **settings), html, as_json)
    raise typer.Exit(1 if flagged else 0)


def _first_image(captions: list[Caption]) -> tuple[Path, Image]:
    """Open the first readable image; errors in the others are reported later, one by one."""
    from revisit.models.images import open_image

    for caption in captions:
        with suppress(RevisitError):
            return caption.image, open_image(caption.image)
    raise RevisitError(f"None of the images can be read; the first is {captions[0].image}.")


def _print_check(result: Check, html: Path | None, as_json: bool) -> bool:
    """Print the check of one text; return whether any word is flagged."""
    flagged, rows = result.flagged(), []
    for word in result.checked:
        patch = f"#{word.vision_token}" if word.patch_row is None else f"{word.patch_row},{word.patch_col}"
        rows.append((word.text, f"{word.support:.2f}", patch, "yes" if word in flagged else ""))
    if as_json:
        options.print_json(result.to_dict())
    else:
        if rows:
            print_table(Table(("word", "support", "patch", "flagged"), rows, ""))
        for note in result.notes:
            print(note)
    if html is not None:
        print(f"Wrote {result.save(html)}")
    if not result.checked:
        raise Incomplete("The text contains none of the words to check; choose other words with --words.")
    return bool(flagged)


def _check_file(
    pair: tuple[Model, Processor],
    captions: list[Caption],
    output: Path,
    settings: dict[str, Any],
    batch_size: int,
    quiet: bool,
) -> bool:
    """Check a file of texts; return whether any word is flagged."""
    from revisit.cli.progress import plural, progress_bar
    from revisit.explain.captions import check_captions, write_summary

    with progress_bar() as bar:
        task = bar.add_task("texts", total=len(captions), visible=not quiet)
        lines, failures = check_captions(
            pair, captions, output, settings, batch_size=batch_size, advance=lambda count: bar.advance(task, count)
        )
    write_summary(output, lines, captions)
    flagged = [line for line in lines if line["flagged"]]
    unchecked = sum(not any(word["checkable"] for word in line["words"]) for line in lines)
    without = f", {unchecked} without a word to check" if unchecked else ""
    print(f"{plural(len(lines), 'text')} checked, {len(flagged)} with flagged words{without}.")
    for line in flagged[:10]:
        print(f"{line['id']} ({line['image']}): {', '.join(line['flagged'])}")
    print(f"Wrote {output}")
    if failures:
        listed = " ".join(failures[:3])
        raise Incomplete(f"{len(failures)} of the texts could not be checked; rerun the command to retry. {listed}")
    if unchecked == len(lines):
        raise Incomplete("The texts contain none of the words to check; choose other words with --words.")
    return bool(flagged)


def _calibrate(model: str, data: str, batch_size: int, quiet: bool, loading: dict[str, Any]) -> None:
    """Measure how well a model can check, and print the entry for its generation_config.json."""
    from revisit.eval.benchmarks.chair import Chair
    from revisit.eval.benchmarks.io.places import resolve_data

    items = Chair().load(resolve_data(data, "chair", None))

    from revisit import load
    from revisit.cli.progress import progress_bar
    from revisit.explain.calibration import calibrate

    pair = load(model, **loading)
    with progress_bar() as bar:
        task = bar.add_task("images", total=len(items), visible=not quiet)
        measured = calibrate(
            *pair,
            [item.images[0] for item in items],
            [set(item.meta["ground_truth"]) for item in items],
            batch_size=batch_size,
            advance=lambda count: bar.advance(task, count),
        )
    print(
        f"Measured on {measured.words} object words in captions by the model; {measured.absent} of these objects are absent."
    )
    print("Add this entry to the model's generation_config.json:")
    entry = {"layer": measured.layer, "threshold": round(measured.threshold, 3), "auroc": round(measured.auroc, 3)}
    options.print_json({"check": entry})
