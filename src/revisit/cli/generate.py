"""`revisit generate`: ask a model about pictures, with any decoding method."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from revisit.cli import options
from revisit.errors import RevisitError

if TYPE_CHECKING:
    from revisit.explain.prefill import PrefillStates
    from revisit.explain.record import Decode


def chosen_method(text: str, assignments: list[str]) -> tuple[str, dict[str, Any]]:
    """A method's name and settings, from its text and from `--set`, which comes on top; checked."""
    from revisit.methods import get, parse_method
    from revisit.registry import parse_assignments

    name, own = parse_method(text)
    settings = {**own, **parse_assignments(assignments)}
    get(name, **settings)  # before the model is loaded: a wrong setting fails at once
    return name, settings


def generate(
    images: list[str] = typer.Argument(None, help="Image files, folders or globs."),
    prompt: str = options.PROMPT,
    model: str = options.MODEL,
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    max_new_tokens: int = options.MAX_NEW_TOKENS,
    sample: bool = options.SAMPLE,
    temperature: float = options.TEMPERATURE,
    top_p: float = options.TOP_P,
    beams: int = options.BEAMS,
    seed: int = typer.Option(0, callback=options.a_seed, help="Seed for --sample."),
    together: bool = typer.Option(
        False, "--together", help="Put all images into one prompt instead of asking about each."
    ),
    html: Path = options.HTML,
    figure: list[Path] = typer.Option([], help="Draw how the answer was decoded (.png, .svg or .pdf). Repeatable."),
    step: list[int] = typer.Option(
        [], min=1, help="Steps in the figure, counted from 1; the default is those that changed most."
    ),
    trace_: bool = typer.Option(False, "--trace", help="Print the steps that the method changed."),
    compare_with: list[str] = options.COMPARE_WITH,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per answer."),
    stream: bool = typer.Option(False, "--stream", help="Print the answer word by word."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Describe pictures, or answer a question about them.

    Examples:

      revisit generate photo.jpg

      revisit generate photo.jpg --html decode.html --compare-with vcd --compare-with greedy --figure figure.png

      revisit generate photos/ --prompt "Is there a dog in the image?" --method revisit --set alpha=1e-3 --json
    """
    from revisit import methods
    from revisit.decoding.settings import Decoding
    from revisit.explain.figure import check_path
    from revisit.models.images import find_images, open_image
    from revisit.pages.document import check_page

    if not images:
        raise RevisitError("No image was given; for example: revisit generate photo.jpg")
    recorded = bool(html or figure or trace_)
    if stream and (beams > 1 or as_json or recorded):
        raise RevisitError("--stream cannot be combined with --beams, --json, --html, --figure or --trace.")
    if recorded and beams > 1:
        raise RevisitError(
            "--html, --figure and --trace cannot be combined with --beams: beams are reordered from step to step."
        )
    Decoding.asked(sample, temperature, top_p)
    method, settings = chosen_method(method, set_)
    others = compared_methods(method, compare_with)
    if others and compare_with != ["greedy"] and not (html or figure):
        raise RevisitError("--compare-with needs --html or --figure, which show the other answers.")
    if step and not figure:
        raise RevisitError("--step needs --figure, whose steps it selects.")
    paths = find_images(images)
    if html is not None:
        check_page(html, paths)
    for path in figure:
        check_path(path, paths)
    if not prompt.strip():
        raise RevisitError("The prompt is empty: pass a question with --prompt.")
    groups = [paths] if together else [[path] for path in paths]
    # before the model is loaded: a bad file fails at once
    pictures = [[open_image(path) for path in group] for group in groups]

    import torch

    from revisit import Trace, load
    from revisit import generate as decode
    from revisit.cli.tables import print_unfamiliar
    from revisit.explain import figure as figures
    from revisit.explain import page, record
    from revisit.explain.prefill import unfamiliar_images, watch_prefill
    from revisit.models.config import is_embedded
    from revisit.models.prompts import answers, new_tokens, prepare

    loaded, processor = load(
        model,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_incomplete=allow_incomplete,
    )
    chosen = methods.as_method(method, loaded, **settings)
    compared = [methods.as_method(name, loaded, **own) for name, own in others] if html or figure else []
    if recorded:
        for shown in (chosen, *compared):
            record.refuse_beams(shown)
    beams = beams if beams > 1 else chosen.own_beams
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample, "num_beams": beams}
    if sample:
        generation |= {"temperature": temperature, "top_p": top_p}
    streaming: dict[str, Any] = {}
    if stream:
        from transformers import TextStreamer

        tokenizer = cast("Any", processor.tokenizer)
        streaming["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    unfamiliar: list[str] = []
    for number, group in enumerate(_progress(groups, quiet=as_json or stream)):
        if sample:
            torch.manual_seed(seed)
        decoded, trace, timings = None, Trace(), {}
        if recorded:
            decoded = record.explain(
                loaded, processor, pictures[number], prompt, [chosen, *compared], model_name=model, **generation
            )
            text, strange = decoded.answers[0].text, decoded.unfamiliar
            trace = decoded.answers[0].trace or trace
        else:
            inputs = prepare(processor, [prompt], [pictures[number]], loaded.device)
            started = time.perf_counter()
            watching: AbstractContextManager[PrefillStates | None] = nullcontext()
            if is_embedded(model):
                watching = watch_prefill(loaded, inputs, copies=beams)
            with watching as seen:
                output = decode(loaded, **inputs, method=chosen, trace=trace, **generation, **streaming)
            seconds, tokens = time.perf_counter() - started, new_tokens(output, inputs).shape[1]
            timings = {"seconds": seconds, "tokens": tokens, "seconds_per_token": seconds / max(tokens, 1)}
            text = answers(processor, output, inputs)[0]
            strange = unfamiliar_images(model, seen, len(group)) if seen is not None else ()
        unfamiliar += [group[n] for n in strange]
        if as_json:
            result = {
                "images": group,
                "prompt": prompt,
                "text": text,
                "model": model,
                "method": trace.method,
                "generation": generation | {"seed": seed},
                "counters": trace.summary(),
                **({"timings": timings} if timings else {}),  # recording takes time of its own
            }
            print(json.dumps(result, ensure_ascii=False), flush=True)
        elif not stream:
            print(f"{', '.join(group)}: {text}" if len(groups) > 1 else text, flush=True)
        if decoded is None:
            continue
        if trace_:
            _print_trace(decoded)
        for path in figure:
            drawn = figures.decode_figure(decoded, 0, [place - 1 for place in step])
            print(f"Wrote {figures.save(drawn, numbered(path, number, len(groups)))}", file=sys.stderr)
        if html:
            print(f"Wrote {page.write(numbered(html, number, len(groups)), decoded)}", file=sys.stderr)
    print_unfamiliar(unfamiliar)


def compared_methods(method: str, compare_with: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """The methods to compare `method` with, by name and settings, checked; "none" and the method itself are left out."""
    from revisit import methods

    wanted = [(name, own) for name, own in methods.parse_methods(compare_with) if name not in (method, "none")]
    return list({methods.get(name, **own): (name, own) for name, own in wanted}.values())


def numbered(path: Path, number: int, count: int) -> Path:
    """Where the file about answer `number` goes: the path itself if there is one answer, else with a number before its ending."""
    return path if count == 1 else path.with_name(f"{path.stem}-{number + 1}{path.suffix}")


def _print_trace(decoded: Decode) -> None:
    """On stderr, so that the answers alone can be piped on."""
    from rich.console import Console

    from revisit.cli.tables import steps_table
    from revisit.report.terminal import print_table

    print_table(steps_table(decoded.answers[0], decoded.layout), Console(file=sys.stderr))
    if decoded.layout.reason:
        print(f"Patches cannot be shown: {decoded.layout.reason}", file=sys.stderr)


def _progress(groups: list[list[str]], *, quiet: bool) -> Iterator[list[str]]:
    """The groups one by one, with a bar on a terminal when there is more than one answer to wait for."""
    if quiet or len(groups) < 2:
        yield from groups
        return
    from revisit.cli.progress import progress_bar

    with progress_bar() as bar:
        yield from bar.track(groups, description="Generating")
