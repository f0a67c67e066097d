"""`revisit explain`: a decode as pictures for papers, or as a page."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options
from revisit.cli.generate import chosen_method, compared_methods
from revisit.cli.tables import show
from revisit.errors import RevisitError, need


def explain(
    images: list[str] = typer.Argument(None, help="Image files; all of them go into one prompt."),
    prompt: str = options.PROMPT,
    model: str = options.MODEL,
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    compare_with: list[str] = options.COMPARE_WITH,
    max_new_tokens: int = options.MAX_NEW_TOKENS,
    step: list[int] = typer.Option([], min=1, help="Steps to draw, from 1; those that changed most unless given."),
    png: Path = typer.Option(None, help="Write a picture here."),
    svg: Path = typer.Option(None, help="Write a picture here, with text as text."),
    html: Path = options.HTML,
    dpi: int = typer.Option(200, min=30, max=1200, help="Resolution of the PNG."),
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Draw how an answer was decoded: which patch was selected at each step, and what it changed.

    Examples:

      revisit explain photo.jpg --png figure.png

      revisit explain photo.jpg --prompt "Is there a dog in the image?" --compare-with vcd --compare-with greedy --html decode.html
    """
    from revisit import methods
    from revisit.explain.figure import check_path
    from revisit.models.images import open_image
    from revisit.pages.document import check_apart, check_page

    if not images:
        raise RevisitError("No image was given; for example: revisit explain photo.jpg --png figure.png")
    if not prompt.strip():
        raise RevisitError("The prompt is empty; say what to ask with --prompt.")
    for path in (png, svg):
        if path:
            need("matplotlib")
            check_path(path)
            check_apart(path, images)
    if html is not None:
        check_page(html, images)
    method, settings = chosen_method(method, set_)
    wanted = [(method, settings), *compared_methods(method, compare_with)]
    pictures = [open_image(path) for path in images]

    from revisit import load
    from revisit.cli.notices import print_notice, print_unfamiliar
    from revisit.explain import figure, page, terminal
    from revisit.explain.record import explain as record

    loaded, processor = load(model, trust_remote_code=trust_remote_code, allow_incomplete=allow_incomplete)
    print_notice(model)
    chosen = [methods.as_method(name, loaded, **own) for name, own in wanted]
    decode = record(
        loaded,
        processor,
        pictures,
        prompt,
        chosen,
        model_name=model,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    print_unfamiliar([images[number] for number in decode.unfamiliar])
    written = [figure.save(figure.decode_figure(decode, 0, [s - 1 for s in step]), p, dpi) for p in (png, svg) if p]
    if html:
        written.append(page.write(html, decode))
    for answer in decode.answers:
        print(f"{answer.name}: {answer.text}")
    if decode.layout.reason:
        print(f"Patches cannot be shown: {decode.layout.reason}")
    if not written:
        show(terminal.table(decode.answers[0], decode.layout))
    for path in written:
        print(f"Wrote {path}")


def register(app: typer.Typer) -> None:
    app.command()(explain)
