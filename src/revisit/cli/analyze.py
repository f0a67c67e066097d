"""`revisit analyze`: the paper's studies on any model and pictures, one command each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from revisit.cli import options
from revisit.cli.progress import reporter
from revisit.errors import RevisitError, need

DATA = typer.Option(
    None,
    help="Folder with COCO val2014 pictures and annotations, or scenes:SPLIT:NUMBER:SEED to generate them (the embedded "
    "model's default is scenes:unusual:100).",
)
LIMIT = typer.Option(None, min=1, help="Only the first pictures.")
OUTPUT = typer.Option(Path("results"), "--out", "-o", help="Where captions and results are kept.")
METHOD = typer.Option("greedy", help="How the captions are decoded; settings as revisit:alpha=0.01.")
TOKENS = typer.Option(512, min=1, help="Longest caption.")
BATCH = typer.Option(8, min=1, help="Captions made together.")


def hallucinated_steps(
    model: str = options.MODEL,
    data: str = DATA,
    limit: int = LIMIT,
    output: Path = OUTPUT,
    method: str = METHOD,
    max_new_tokens: int = TOKENS,
    batch_size: int = BATCH,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Where a caption names what is not there: is a word for what *is* there still among the likeliest?

    Example: revisit analyze hallucinated-steps --data scenes:unusual:300 --out runs/studies
    """
    from revisit.paper.steps import hallucinated_steps as study

    subject = _subject(model, data, limit, output, method, max_new_tokens, batch_size, dtype, device_map)
    _run("hallucinated-steps", subject, study, quiet)


def gt_vs_hal(
    model: str = options.MODEL,
    data: str = DATA,
    limit: int = LIMIT,
    output: Path = OUTPUT,
    method: str = METHOD,
    max_new_tokens: int = TOKENS,
    batch_size: int = BATCH,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Probability of words for what the picture shows and does not show, with the image and without it.

    Example: revisit analyze gt-vs-hal --data scenes:unusual:300 --out runs/studies
    """
    from revisit.paper.grounding import gt_vs_hal as study

    subject = _subject(model, data, limit, output, method, max_new_tokens, batch_size, dtype, device_map)
    _run("gt-vs-hal", subject, study, quiet)


def projection(
    model: str = options.MODEL,
    data: str = DATA,
    limit: int = LIMIT,
    output: Path = OUTPUT,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """What single vision tokens say, per layer, over the whole vocabulary and over object words.

    Example: revisit analyze projection --data scenes:unusual:300 --out runs/studies
    """
    from revisit.paper.projection import projection as study
    from revisit.paper.study import NO_CAPTIONS

    subject = _subject(model, data, limit, output, dtype=dtype, device_map=device_map)
    _run("projection", subject, study, quiet, NO_CAPTIONS)


def vision_words(
    model: str = options.MODEL,
    data: str = DATA,
    limit: int = LIMIT,
    output: Path = OUTPUT,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Three vision tokens of one picture, word by word: over the whole vocabulary, and over nine object words.

    Example: revisit analyze vision-words --data scenes:unusual:20 --out runs/studies
    """
    from revisit.paper.study import NO_CAPTIONS
    from revisit.paper.words import vision_words as study

    subject = _subject(model, data, limit, output, dtype=dtype, device_map=device_map)
    _run("vision-words", subject, study, quiet, NO_CAPTIONS)


def case_study(
    model: str = options.MODEL,
    data: str = DATA,
    limit: int = LIMIT,
    output: Path = OUTPUT,
    set_: list[str] = typer.Option([], "--set", help="A setting of ReVisiT, key=value; may be repeated."),
    count: int = typer.Option(4, min=1, help="How many steps to print in full."),
    max_new_tokens: int = TOKENS,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """What ReVisiT changed: every changed step by kind, and some of them candidate by candidate.

    Example: revisit analyze case-study --set alpha=1e-3 --data scenes:unusual:100 --out runs/studies
    """
    from revisit.decoding.grammar import parse_assignments
    from revisit.decoding.options import parse_settings
    from revisit.evaluation.plan import label
    from revisit.methods.revisit import ReVisiT
    from revisit.models.loading import load_config
    from revisit.paper.cases import case_studies

    settings = parse_settings(ReVisiT, parse_assignments(set_))
    chosen = ReVisiT.recommended(load_config(model).model_type, **settings)  # the paper's layers for the family
    subject = _subject(model, data, limit, output, None, max_new_tokens, 1, dtype, device_map)
    _run("case-study", subject, lambda s, r: case_studies(s, chosen, count, r), quiet, {"method": label(chosen)})


def pointing(
    model: str = options.MODEL,
    data: str = DATA,
    limit: int = LIMIT,
    output: Path = OUTPUT,
    method: list[str] = typer.Option(
        None,
        help="ReVisiT with settings, as revisit:layers=0; may be repeated. Unless given, one setting is changed at a time.",
    ),
    max_new_tokens: int = TOKENS,
    batch_size: int = BATCH,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Does the selected patch lie on the object that is named? Against chance, by layer and by setting.

    The data folder must hold boxes: COCO's instances file, or generated scenes.

    Example: revisit analyze pointing --data scenes:unusual:300 --out runs/studies
    """
    from revisit.paper.pointing import SETTINGS, BoxedPictures, check_settings
    from revisit.paper.pointing import pointing as study

    chosen = tuple(method or SETTINGS)
    check_settings(chosen)
    subject = _subject(
        model, data, limit, output, None, max_new_tokens, batch_size, dtype, device_map, cls=BoxedPictures
    )
    _run("pointing", subject, lambda s, r: study(s, chosen, r), quiet, {"method": list(chosen)})


def _subject(
    model: str,
    data: str | None,
    limit: int | None,
    output: Path,
    method: str | None = None,
    max_new_tokens: int = 512,
    batch_size: int = 8,
    dtype: str | None = None,
    device_map: str | None = None,
    cls: Any = None,
) -> Any:
    from revisit.evaluation.config import DEFAULT_SCENES
    from revisit.models.config import OF_SCENES
    from revisit.paper.study import Subject

    if data is None and model not in OF_SCENES:
        raise RevisitError(f"Say where the pictures are: --data DIR, or --data {DEFAULT_SCENES} for generated scenes.")
    return (cls or Subject)(
        model=model,
        data=data or DEFAULT_SCENES,
        limit=limit,
        output=str(output),
        method=method or "greedy",
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device_map=device_map,
    )


def _run(name: str, subject: Any, study: Callable[..., Any], quiet: bool, extra: dict[str, Any] | None = None) -> None:
    """Runs a study with progress, stores it and prints its tables."""
    from revisit.evaluation.scenes import scene_packages
    from revisit.evaluation.store import make_folder
    from revisit.paper.sections import study_section
    from revisit.paper.study import read_study, save
    from revisit.report.terminal import print_section

    need("nltk", "scipy", "statsmodels", *scene_packages(subject.data))
    _ = subject.items  # what is wrong with the data is told before a folder is made
    make_folder(Path(subject.output))
    with reporter(quiet) as progress:
        result = study(subject, progress)
    path = save(subject, name, result, extra)
    print_section(study_section(read_study(path)))
    print(f"Stored in {path}; `revisit report {quote(subject.output)}` draws it.")


def register(app: typer.Typer) -> None:
    """Add `analyze` and its studies."""
    group = typer.Typer(help="The paper's studies, on any model and pictures.", no_args_is_help=True)
    group.command("hallucinated-steps")(hallucinated_steps)
    group.command("gt-vs-hal")(gt_vs_hal)
    group.command("projection")(projection)
    group.command("vision-words")(vision_words)
    group.command("case-study")(case_study)
    group.command("pointing")(pointing)
    app.add_typer(group, name="analyze")
