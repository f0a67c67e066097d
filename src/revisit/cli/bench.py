"""`revisit bench`: what a method costs, measured beside plain decoding."""

from __future__ import annotations

import json
from typing import Any

import typer

from revisit.cli import options
from revisit.errors import RevisitError


def bench(
    methods_: list[str] = typer.Option(
        ["revisit"], "--method", "-d", help="Methods, separated by commas; settings as revisit:layers=all,alpha=1e-5."
    ),
    model: str = options.MODEL,
    random_weights: str = typer.Option(
        None, "--random-weights", help="Random weights: a config.json, or a shape such as qwen2.5-vl-0.5b."
    ),
    image: str = typer.Option(None, help="Picture to describe; a plain gradient if not given."),
    prompt: str = options.PROMPT,
    vision_tokens: int = typer.Option(346, min=1, help="With --random-weights: vision tokens of the prompt."),
    median: int = typer.Option(64, min=1, help="With --random-weights: median size of the plausible set."),
    spread: float = typer.Option(1.3, min=0, help="With --random-weights: deviation of the log size; 0: all alike."),
    new_tokens: int = typer.Option(64, "--max-new-tokens", min=3, help="Tokens per call."),
    warmups: int = typer.Option(1, min=0, help="Short calls before anything counts."),
    repeats: int = typer.Option(3, min=1, help="Calls per method; methods take turns."),
    batch: int = typer.Option(1, "--batch-size", min=1, help="Rows per call."),
    beams: int = options.BEAMS,
    threads: int = typer.Option(None, min=1, help="CPU threads."),
    dtype: str = typer.Option(None, help="float32, float16 or bfloat16."),
    device: str = typer.Option("cpu", help="With --random-weights: cpu, cuda, ..."),
    as_json: bool = options.JSON,
) -> None:
    """Time methods beside plain decoding: first token, ms per token (mean ± deviation over repeats), peak extra memory.

    Examples:

      revisit bench --method revisit,vcd

      revisit bench --random-weights qwen2.5-vl-0.5b --method revisit:layers=all --median 512 --spread 0
    """
    import torch

    from revisit import methods
    from revisit.models.loading import as_dtype
    from revisit.paper import latency
    from revisit.step.compiled import kernel

    wanted = {_label(name, settings): (name, settings) for name, settings in methods.parse_methods(methods_)}
    chosen = {text: methods.get(name, **settings) for text, (name, settings) in wanted.items()}
    if threads is not None:
        torch.set_num_threads(threads)
    profile = None
    if random_weights is not None:
        loaded = latency.random_model(random_weights, dtype=as_dtype(dtype or "float32"), device=_device(device))
        inputs = latency.random_inputs(loaded, vision_tokens, batch=batch)
        vocabulary = loaded.config.get_text_config().vocab_size
        profile = latency.Profile(median=median, spread=spread, largest=min(8000, vocabulary // 4), steps=new_tokens)
    else:
        from revisit import load
        from revisit.models.prompts import prepare

        loaded, processor = load(model, dtype=dtype)
        chosen = {text: methods.recommended(name, loaded, **settings) for text, (name, settings) in wanted.items()}
        inputs = dict(prepare(processor, [prompt] * batch, [[_picture(image)]] * batch, loaded.device))
    plans: dict[str, Any] = {"greedy": (methods.get("greedy"), profile)}
    plans |= {name: (method, profile) for name, method in chosen.items()}
    timings = latency.measure(
        loaded, inputs, plans, new_tokens=new_tokens, repeats=repeats, warmups=warmups, num_beams=beams
    )
    rows = latency.table(timings)
    where = {
        "model": random_weights or model,
        "random_weights": random_weights is not None,
        "profile": profile.describe() if profile else None,
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
    print(", ".join(f"{key} {value}" for key, value in where.items() if value is not None and key != "profile"))
    if profile is not None:
        print(f"random weights; {profile.describe()}")
    print(latency.show(rows))
    print("× to greedy: first token by the median call, ms/token by the lower quartile of all intervals.")


def _label(name: str, settings: dict[str, Any]) -> str:
    """A method as it was typed."""
    return ":".join([name, *([",".join(f"{key}={value}" for key, value in settings.items())] if settings else [])])


def _device(name: str) -> Any:
    """The device, if it is there."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise RevisitError(f"--device {name}: it cannot be used here ({reason}); try --device cpu.") from None
    return name


def _picture(path: str | None) -> Any:
    from pathlib import Path

    from PIL import Image

    from revisit.models.images import open_image

    if path is not None:
        return open_image(Path(path))
    return Image.linear_gradient("L").convert("RGB")


def register(app: typer.Typer) -> None:
    app.command()(bench)
