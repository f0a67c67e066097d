"""`revisit analyze`: run the paper's studies on any model and images."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import typer

from revisit.cli import options
from revisit.errors import RevisitError, need, unknown
from revisit.eval.benchmarks.io.places import DEFAULT_SCENES, scene_packages
from revisit.eval.report.terminal import print_section
from revisit.models.config import EMBEDDED

NAMES = ("hallucinated-steps", "gt-vs-hal", "projection", "case-study")


def analyze(
    context: typer.Context,
    study: str = typer.Argument("", help=f"Study: {', '.join(NAMES)}."),
    model: str = options.MODEL,
    data: str = typer.Option(
        None,
        metavar="SOURCE",
        help="Folder with COCO's val2014 images and annotations, or scenes:SPLIT:NUMBER:SEED to generate scenes. Default for "
        "'tiny': scenes:unusual:100.",
    ),
    limit: int = typer.Option(None, min=1, help="Use only this many images."),
    output: Path = typer.Option(Path("results"), "--out", "-o", help="Folder for captions and results."),
    method: str = typer.Option(
        None,
        help="Decoding method of the captions; by default greedy. For case-study: ReVisiT with settings, for example "
        "revisit:alpha=0.01.",
    ),
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum length of a caption, in tokens."),
    batch_size: int = typer.Option(8, min=1, help="Batch size."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    quiet: bool = options.QUIET,
) -> None:
    """Run one of the paper's studies, store the results and print tables.

    hallucinated-steps: the rank of words for present objects at steps that name an absent one.

    gt-vs-hal: the probability of words for present and absent objects, with and without the image.

    projection: the predictions of single vision tokens by layer, over the whole vocabulary and over object words.

    case-study: all steps that ReVisiT changed, by kind, some of them with their candidates.

    Examples:

      revisit analyze projection --data scenes:unusual:300 --out runs/studies
      revisit analyze case-study --method revisit:alpha=1e-3 --data scenes:unusual:100 --out runs/studies
    """
    if not study:
        raise RevisitError(f"Name a study: {', '.join(NAMES)}.")
    if study not in NAMES:
        raise unknown("study", study, NAMES)
    for name in ("method", "max_new_tokens", "batch_size"):
        source: Any = context.get_parameter_source(name)  # compared by name: typer may have its own copy of click
        if study == "projection" and source.name != "DEFAULT":
            raise RevisitError(f"--{name.replace('_', '-')} cannot be used with projection, which decodes nothing.")
    from revisit.cli.progress import reporter
    from revisit.methods import as_method
    from revisit.methods.revisit import ReVisiT
    from revisit.paper.report import STUDIES, run_study, study_section
    from revisit.paper.study import CAPTIONS, Subject

    if data is None and model != EMBEDDED:
        raise RevisitError(f"--data is missing: give a folder, or {DEFAULT_SCENES} for generated scenes.")
    if method is not None and not isinstance(as_method(method), ReVisiT) and study == "case-study":
        raise RevisitError(f"Case studies need ReVisiT: use --method revisit, with any settings, not {method}.")
    subject = Subject(
        model=model,
        data=data or DEFAULT_SCENES,
        limit=limit,
        out=str(output),
        method=(method,) if method else STUDIES[study].methods,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device_map=device_map,
    )
    need("nltk", "scipy", "statsmodels", "matplotlib", *scene_packages(subject.data))
    with reporter(quiet, output / CAPTIONS) as progress:
        progress.note(f"Plan: {study} on {model}, {len(subject.items)} images.")
        found = run_study(study, subject, progress)
    print_section(study_section(found))
    print(f"Stored in {output}; `revisit report {quote(str(output))}` shows the results.")
