"""`revisit analyze`: the paper's studies on any model and images, one command each."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import typer

from revisit.cli import options
from revisit.errors import RevisitError, need, unknown

CAPTIONED = ("method", "max_new_tokens", "batch_size")
# Options that only some studies read, by study.
OPTIONS: dict[str, tuple[str, ...]] = {
    "latency": ("method",),
    "hallucinated-steps": CAPTIONED,
    "gt-vs-hal": CAPTIONED,
    "projection": (),
    "case-study": CAPTIONED,
}


def analyze(
    context: typer.Context,
    study: str = typer.Argument(..., help=f"One of: {', '.join(OPTIONS)}."),
    model: str = options.MODEL,
    data: str = typer.Option(
        None,
        help="Folder with COCO val2014 images and annotations, or scenes:SPLIT:NUMBER:SEED to generate them (the embedded "
        "model's default is scenes:unusual:100).",
    ),
    limit: int = typer.Option(None, min=1, help="Use only the first images."),
    output: Path = typer.Option(Path("results"), "--out", "-o", help="Folder for captions and results."),
    method: list[str] = typer.Option(
        None,
        help="How captions are decoded, such as revisit:alpha=0.01 (default: greedy). For case-study: ReVisiT with the "
        "settings to study; for latency: the methods to time, repeatable.",
    ),
    max_new_tokens: int = typer.Option(512, min=1, help="Maximum length of a caption, in tokens."),
    batch_size: int = typer.Option(8, min=1, help="Batch size."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    plan_only: bool = options.PLAN,
    quiet: bool = options.QUIET,
) -> None:
    """Run one of the paper's studies, store the results and print tables.

    hallucinated-steps: when a caption names an absent object, how high does a word for a present one rank?

    gt-vs-hal: probability of words for present and absent objects, with and without the image.

    projection: what single vision tokens predict, by layer, over the whole vocabulary and over object words.

    latency: time per token and to the first token, by the paper's protocol.

    case-study: every step that ReVisiT changed, by kind, with the candidates of some of them.

    Examples:

      revisit analyze projection --data scenes:unusual:300 --out runs/studies

      revisit analyze case-study --method revisit:alpha=1e-3 --data scenes:unusual:100 --out runs/studies
    """
    if study not in OPTIONS:
        raise unknown("study", study, OPTIONS)
    for name in sorted({name for names in OPTIONS.values() for name in names} - set(OPTIONS[study])):
        if options.typed(context, name):
            raise RevisitError(f"--{name.strip('_').replace('_', '-')} cannot be used with {study}.")
    if method and len(method) > 1 and study != "latency":
        raise RevisitError(f"{study} uses one method, not {len(method)}: pass --method once.")
    from revisit.cli.progress import plural, reporter
    from revisit.eval.benchmarks.io.places import DEFAULT_SCENES, scene_packages
    from revisit.eval.report.terminal import print_section
    from revisit.explain.files import make_folder
    from revisit.methods import as_method
    from revisit.models.config import EMBEDDED
    from revisit.paper.studies import STUDIES, read_study, run_study, study_section
    from revisit.paper.study import CAPTIONS, Subject

    if data is None and model != EMBEDDED:
        raise RevisitError(f"--data is missing: give a folder, or {DEFAULT_SCENES} for generated scenes.")
    methods, only = tuple(method or STUDIES[study].methods), STUDIES[study].only
    for text in methods:
        if only and as_method(text).name != only:
            raise RevisitError(f"{study} studies ReVisiT: use --method {only}, with any settings, not {text!r}.")
    subject = Subject(
        model=model,
        data=data or DEFAULT_SCENES,
        limit=limit,
        output=str(output),
        methods=methods,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        dtype=dtype,
        device_map=device_map,
    )
    need("nltk", "scipy", "statsmodels", "matplotlib", *scene_packages(subject.data))
    images = plural(len(subject.items), "image")  # bad data is reported before a folder is created
    text = f"Plan: {study} on {model}, {images}"
    if "method" in OPTIONS[study]:
        answers = plural(len(subject.items) * len(methods), "answer")
        text += f", {answers} of at most {max_new_tokens} tokens ({', '.join(methods)})"
    if plan_only:
        print(f"{text}.")
        return
    make_folder(output)
    with reporter(quiet, output / CAPTIONS) as progress:
        progress.note(f"{text}.")
        path = run_study(study, subject, progress)
    print_section(study_section(read_study(path)))
    print(f"Stored in {path}; `revisit report {quote(str(output))}` shows the results.")
