"""`revisit check`: check which words of a text are supported by its image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.errors import Incomplete, RevisitError
from revisit.eval.report.document import Table
from revisit.eval.report.terminal import print_table
from revisit.io.records import Fields
from revisit.pages.document import check_page

if TYPE_CHECKING:
    from revisit.explain.checked import Check
    from revisit.models.types import Model, Processor
    from revisit.video.clip import Visual


def check(
    source: Path = typer.Argument(None, help="An image or a video, or a file of texts (with --images)."),
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
    labels: str = typer.Option(
        None,
        metavar="COLUMN",
        help="Print precision and recall by threshold. The column has the objects in each image, or yes or no: whether the text is "
        "right. Without --images, stored checks are used.",
    ),
    field: str = typer.Option(None, help="Field of the file that contains the text, if there are several candidates."),
    batch_size: int = typer.Option(8, min=1, help="Number of texts per forward pass."),
    frames: int = options.FRAMES,
    fps: float = options.FPS,
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

    A file of texts can have any layout that `revisit score chair` accepts. The folder of its results gets checks.jsonl, with one line
    per text, flagged.csv, with the rows that have flagged words, failures.jsonl, summary.json, and index.html, which lists the texts
    with the least support first. Another --threshold flags other words without another forward pass.

    Exit status: 0 if no word is flagged, 1 if a word is flagged, 2 for wrong input, 3 if there is no word to check or a text
    cannot be checked.

    Examples:

      revisit check photo.jpg "A dog on a couch." --model photo
      revisit check captions.jsonl --images val2014 --out checks --model llava-hf/llava-1.5-7b-hf
      revisit check captions.csv --out checks --labels objects
    """
    loading: Fields = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "allow_incomplete": allow_incomplete,
    }
    if source is None or (text is None and images is None and labels is None):
        raise RevisitError(
            'Give an image and its text, or a file of texts with --images: revisit check photo.jpg "A dog."'
        )
    if not source.exists():
        raise RevisitError(f"There is no file {source}.")
    if text is not None and any(option is not None for option in (images, output, field, labels)):
        raise RevisitError("--images, --out, --field and --labels need a file of texts, not a single text.")
    if text is None and (frames, fps) != (None, None):
        raise RevisitError("--frames and --fps are for a video and its text.")
    if text is None and (html is not None or output is None or output.is_file()):
        raise RevisitError("A file of texts needs a folder for its results: use --out DIR, without --html.")
    from revisit.cli.progress import counted, resumable
    from revisit.explain.captions import check_captions, read_captions, stored_lines, write_summary
    from revisit.explain.checkable import need_words
    from revisit.explain.sweep import sweep
    from revisit.io.records import read_answers

    kind_or_list = words if words in ("objects", "content") else [word for word in words.split(",") if word.strip()]
    if prompt is not None and not prompt.strip():
        raise RevisitError(f"The prompt must be a question or a request, not {prompt!r}.")
    if not kind_or_list:
        raise RevisitError("--words must be objects, content, or a list like dog,cat,cup.")
    if text is not None:
        from revisit.models.reader import open_visuals
        from revisit.video.sampling import Sampling

        if html is not None:
            check_page(html, [source])
        need_words(text)
        visuals = open_visuals((source, None), Sampling(frames, fps))
        pair = options.load_for_image(model, visuals[0], str(source), any_image=any_image, **loading)
        from revisit.explain.check import check as check_one

        result = check_one(pair, visuals, text, prompt, threshold=threshold, words=kind_or_list)
        raise typer.Exit(1 if _print_check(result, html, as_json) else 0)

    def load(image: Visual, name: str) -> tuple[Model, Processor]:
        return options.load_for_image(model, image, name, any_image=any_image, **loading)

    summary: Fields = {"file": str(source), "out": str(output)}
    if images is not None:
        captions = read_captions(source, images, field)
        identity = options.identity(model, file=source.name, dtype=dtype, device_map=device_map)
        settings: Fields = {"prompt": prompt, "words": kind_or_list, "batch_size": batch_size}
        with resumable(output), counted("texts", len(captions), quiet) as advance:
            failures = check_captions(load, captions, output, identity, advance=advance, **settings)
        summary |= write_summary(captions, output, threshold, failures)
    if labels is not None:
        rows = [answer.record for answer in read_answers(source, field)]
        summary["labels"] = sweep(rows, stored_lines(output), labels, threshold)
    _print_summary(summary, as_json)


def _print_summary(summary: Fields, as_json: bool) -> None:
    """Print the results of a file of texts, and end with their exit status."""
    from revisit.cli.progress import plural

    failures = [
        (f"{f['id']} ({f['image']})" if f["image"] else f["id"], f["error"]) for f in summary.get("failures", ())
    ]
    if as_json:
        options.print_json(summary)
    elif "checked" in summary:
        unchecked = summary["without_words"]
        without = f", {unchecked} without a word to check" if unchecked else ""
        print(f"{plural(summary['checked'], 'text')} checked, {summary['flagged']} with flagged words{without}.")
        for word, count in summary["most_flagged"].items():
            print(f"  {word}: {count}")
        print(f"Wrote {summary['out']}")
    if "labels" in summary and not as_json:
        _print_labels(summary["labels"])
    if failures:
        options.print_failures(failures)
        raise Incomplete(f"{len(failures)} of the texts could not be checked; rerun the command to retry.")
    if "checked" in summary and summary["without_words"] == summary["checked"]:
        raise Incomplete("The texts contain none of the words to check; choose other words with --words.")
    raise typer.Exit(1 if summary.get("flagged") else 0)


def _print_labels(found: Fields) -> None:
    """Print precision and recall by threshold."""
    from revisit.cli.progress import plural

    unit, wrong = found["unit"], found["wrong"]
    score = "-" if found["auroc"] is None else f"{found['auroc']:.3f}"
    caption = f"{plural(found['labelled'], unit)} with a label, {wrong} of them wrong; AUROC {score}."
    rows = []
    for row in found["thresholds"]:
        numbers = ("-" if row[name] is None else f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
        mark = " *" if row["threshold"] == found["best_threshold"] else ""
        rows.append((f"{row['threshold']:.4g}{mark}", str(row["flagged"]), *numbers))
    print_table(Table(("threshold", "flagged", "precision", "recall", "F1"), rows, caption))
    best = f"{found['best_threshold']:.4g}"
    print(
        f'* The best F1 on these labels: --threshold {best}, or "threshold": {best} of `check` in generation_config.json.'
    )


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
