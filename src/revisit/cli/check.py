"""`revisit check`: which words of a text does its picture support?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.errors import Incomplete, RevisitError

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.explain.check_files import CheckOptions, Row
    from revisit.models.types import Model, Processor

    Pair = tuple[Model, Processor]


def check(
    source: Path = typer.Argument(None, help="A picture, followed by its text; or a file of texts with --images."),
    text: str = typer.Argument(None, help="The text to check against the picture."),
    images: Path = typer.Option(None, help="Folder with the pictures of a file of texts."),
    output: Path = typer.Option(
        None, "--out", "-o", help="Folder for the results of a file of texts; an existing one is resumed."
    ),
    model: str = options.MODEL,
    prompt: str = typer.Option(None, "--prompt", "-p", help="The question that the text answers."),
    threshold: float = typer.Option(
        None, help="Flag words with less support than this, from 0 to 1; by default the model's own threshold."
    ),
    words: str = typer.Option("objects", help="objects, content, or a list such as dog,cat,cup."),
    field: str = typer.Option(None, help="Field of the file that holds the text, if it is not clear."),
    batch_size: int = typer.Option(8, min=1, help="Texts in one forward pass."),
    calibrate: str = typer.Option(
        None,
        help="Measure how well the model can check, on pictures whose objects are known (COCO's annotations, or scenes:…), and print "
        "the layer and the threshold to put into its generation_config.json.",
    ),
    html: Path = options.HTML,
    as_json: bool = options.JSON,
    quiet: bool = options.QUIET,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Check which words of a text the picture supports. The exit code is 1 if a word is doubtful.

    A file of texts can have any layout that `revisit score chair` reads. The folder --out then contains checks.jsonl (one line per
    text), summary.csv and index.html (most doubtful first). If texts could not be checked, they are listed and the exit code is 3.

    Examples:

      revisit check photo.jpg "A dog on a couch."

      revisit check captions.jsonl --images val2014 --out checks

      revisit check --calibrate coco --model llava-hf/llava-1.5-7b-hf
    """
    if calibrate is not None:
        if as_json or any(o is not None for o in (source, images, output, prompt, threshold, field, html)):
            raise RevisitError("--calibrate measures the model: use it with --model, --batch-size and --quiet only.")
        _calibrate(model, calibrate, batch_size, quiet)
        return
    if source is None:
        raise RevisitError('Give a picture and its text: revisit check photo.jpg "A dog."')
    if not source.exists():
        raise RevisitError(f"There is no file {source}.")
    if text is None and images is None:
        raise RevisitError(
            'Give the text to check after the picture, or a file of texts with --images: revisit check photo.jpg "A dog."'
        )
    if text is not None and (images is not None or output is not None or field is not None):
        raise RevisitError("--images, --out and --field need a file of texts, not a single text.")
    if text is None and (html is not None or as_json):
        raise RevisitError("--html and --json need a single text; a file of texts writes its page and lines to --out.")
    if text is None and output is None:
        raise RevisitError("A file of texts needs --out DIR for its results.")
    if output is not None and output.exists() and not output.is_dir():
        raise RevisitError(f"{output} is a file; --out must be a folder.")
    chosen = words if words in ("objects", "content") else [word for word in words.split(",") if word.strip()]

    from revisit.explain.check import check_options, check_text
    from revisit.explain.check_files import CheckOptions, read_rows
    from revisit.models.images import open_image
    from revisit.models.loading import load
    from revisit.pages.document import check_page

    asked = CheckOptions(prompt=prompt, threshold=threshold, words=chosen)
    check_options(**asked)
    if text is not None:
        check_text(text)
        if html is not None:
            check_page(html, [source])
        image = open_image(source)
        pair = load(model, trust_remote_code=trust_remote_code, allow_incomplete=allow_incomplete)
        flagged = _one(pair, image, text, asked, html, as_json)
    else:
        rows = read_rows(source, images, field)
        pair = load(model, trust_remote_code=trust_remote_code, allow_incomplete=allow_incomplete)
        flagged = _file(pair, rows, output, asked, batch_size, quiet)
    raise typer.Exit(1 if flagged else 0)


def _one(pair: Pair, image: Image, text: str, asked: CheckOptions, html: Path | None, as_json: bool) -> bool:
    """Check one text; returns whether a word is flagged."""
    from revisit.explain.check import check
    from revisit.report.document import Table
    from revisit.report.terminal import print_table

    found = check(pair, image, text, **asked)
    flagged = found.flagged()
    if as_json:
        print(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        heads, rows = ("word", "support", "model's probability", "patch", "fits better", "doubtful"), []
        for word in found.words:
            if word.checkable:
                place = f"{word.patch_row},{word.patch_col}" if word.patch_row is not None else f"#{word.vision_token}"
                chance = "" if word.probability is None else f"{word.probability:.2f}"
                doubtful = "yes" if word in flagged else ""
                rows.append((word.text, f"{word.support:.2f}", chance, place, word.instead or "", doubtful))
        if rows:
            print_table(Table(heads, rows, ""))
        for note in found.notes:
            print(note)
    if html is not None:
        print(f"Wrote {found.save(html)}")
    return bool(flagged)


def _file(pair: Pair, rows: list[Row], output: Path, asked: CheckOptions, batch_size: int, quiet: bool) -> bool:
    """Check a file of texts; returns whether any word is flagged."""
    from revisit.cli.progress import progress_bar
    from revisit.evaluation.plan import plural
    from revisit.explain.check_files import check_rows, write_summary

    with progress_bar() as bar:
        task = bar.add_task("texts", total=len(rows), visible=not quiet)
        lines, failures = check_rows(
            pair, rows, output, asked, batch_size=batch_size, advance=lambda count: bar.advance(task, count)
        )
    write_summary(output, lines, rows)
    flagged = [line for line in lines if line["flagged"]]
    print(f"{plural(len(lines), 'text')} checked, {len(flagged)} with doubtful words.")
    for line in flagged[:10]:
        print(f"{line['id']} ({line['image']}): {', '.join(line['flagged'])}")
    print(f"Wrote {output}")
    if failures:
        listed = " ".join(failures[:3])
        raise Incomplete(
            f"{plural(len(failures), 'text')} could not be checked; run the command again to retry. {listed}"
        )
    return bool(flagged)


def _calibrate(model: str, data: str, batch_size: int, quiet: bool) -> None:
    """Print what a model's generation_config.json should say about checks."""
    from revisit.cli.progress import reporter
    from revisit.paper.check import Checked, check_study
    from revisit.paper.study import CAPTIONS

    subject = Checked(model=model, data=data, batch_size=batch_size)
    with reporter(quiet, Path(subject.output) / CAPTIONS) as progress:
        found = check_study(subject, progress)
    captions, entry = found["check"]["captions"], found["recommended"]
    rounded = {name: value if name == "layer" else round(value, 3) for name, value in entry.items()}
    print(
        f"Measured on {captions['words']} object words of the model's own captions, {captions['absent']} of them absent."
    )
    print("Put this into the model's generation_config.json:")
    print(json.dumps({"check": rounded}))
