"""`revisit bench`: the cost of a method, compared with plain decoding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from revisit.cli import options

if TYPE_CHECKING:
    from revisit.decoding.method import Method


def bench(
    methods_: list[str] = typer.Option(
        ["revisit"], "--method", "-d", help="Methods, separated by commas; settings as revisit:layers=all,alpha=1e-5."
    ),
    model: str = options.MODEL,
    image: str = typer.Option(None, help="Picture to describe; the default is a plain gradient."),
    prompt: str = options.PROMPT,
    new_tokens: int = typer.Option(64, "--max-new-tokens", min=3, help="Tokens per call."),
    warmups: int = typer.Option(1, min=0, help="Warm-up calls."),
    repeats: int = typer.Option(3, min=1, help="Timed calls per method; methods alternate."),
    batch: int = typer.Option(1, "--batch-size", min=1, help="Rows per call."),
    beams: int = options.BEAMS,
    threads: int = typer.Option(None, min=1, help="CPU threads."),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    as_json: bool = options.JSON,
) -> None:
    """Time methods against plain decoding: first token, ms per token.

    Examples:

      revisit bench --method revisit,vcd

      revisit bench --model path/to/model --method revisit:layers=all --threads 1
    """
    import torch
    from PIL.Image import linear_gradient

    from revisit import load, methods
    from revisit.evaluation.plan import plural
    from revisit.models.images import open_image
    from revisit.models.prompts import prepare
    from revisit.paper import latency
    from revisit.report.document import Section
    from revisit.report.terminal import print_section
    from revisit.step.compiled import kernel

    wanted = {_label(name, settings): (name, settings) for name, settings in methods.parse_methods(methods_)}
    if threads is not None:
        torch.set_num_threads(threads)
    picture = open_image(image) if image is not None else linear_gradient("L").convert("RGB")
    loaded, processor = load(model, dtype=dtype, device_map=device_map)
    inputs = dict(prepare(processor, [prompt] * batch, [[picture]] * batch, loaded.device))
    plans: dict[str, Method] = {"greedy": methods.get("greedy")}
    plans |= {text: methods.as_method(name, loaded, **own) for text, (name, own) in wanted.items()}
    timings = latency.measure(
        loaded, inputs, plans, new_tokens=new_tokens, repeats=repeats, warmups=warmups, num_beams=beams
    )
    rows = latency.table(timings)
    where = {
        "model": model,
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "compiled_step": kernel.library() is not None,
        "new_tokens": new_tokens,
        "repeats": repeats,
        "warmups": warmups,
        "batch": batch,
        "beams": beams,
    }
    if as_json:
        print(json.dumps({**where, "methods": rows}, ensure_ascii=False))
        return
    step = "compiled" if where["compiled_step"] else "torch"
    caption = (
        f"{model} on {where['device']} in {where['dtype']}, {plural(torch.get_num_threads(), 'thread')}, torch {torch.__version__}, "
        f"{step} step. {plural(repeats, 'call')} of {new_tokens} tokens for each method, {plural(batch, 'row')} per call"
        f"{f', {beams} beams' if beams > 1 else ''}. ms/token is mean ± deviation over calls; the ratio next to the lower quartile "
        "of all tokens is its ratio to greedy's."
    )
    print_section(Section("Cost of methods", [latency.bench_table(rows, caption)]))


def _label(name: str, settings: dict[str, Any]) -> str:
    """A method as it was typed."""
    return ":".join([name, *([",".join(f"{key}={value}" for key, value in settings.items())] if settings else [])])
