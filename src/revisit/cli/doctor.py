"""`revisit doctor`: check this machine, and what a model needs before you download it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.errors import EXTRAS, RevisitError

if TYPE_CHECKING:
    from revisit.models.facts import ModelFacts

Row = tuple[str, str]


def doctor(
    model: str = typer.Argument(None, help="Local folder or Hub id; the weights are not loaded."),
    image_size: tuple[int, int] = typer.Option(
        (640, 480), metavar="WIDTH HEIGHT", help="Of an image, to compute the number of vision tokens."
    ),
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    as_json: bool = options.JSON,
) -> None:
    """Check the installation, or a model before it is downloaded: vision tokens, layers, memory.

    Exit status: 0 if everything works, 1 if something is not supported, 2 if the model cannot be read.

    Examples:

      revisit doctor
      revisit doctor llava-hf/llava-1.5-7b-hf --image-size 1024 768 --json
    """
    machine, warnings, facts = dict(machine_rows()), list(machine_warnings()), None
    if model is not None:
        from revisit.models.facts import model_facts

        facts = model_facts(model, image_size=image_size, trust_remote_code=trust_remote_code)
    problems = list(facts.problems) if facts else []
    about = dict(model_rows(facts)) if facts else None
    if as_json:
        options.print_json({"machine": machine, "warnings": warnings, "model": about, "problems": problems})
    else:
        if about is not None:
            options.print_facts(str(model), about.items())
            for reason in problems or ["ReVisiT can be used with this model."]:
                print(f"{'✗' if problems else '✓'} {reason}")
            print()
        options.print_facts("This machine", machine.items())
        for warning in warnings:
            print(f"! {warning}")
    if problems:
        raise typer.Exit(1)


def machine_rows() -> Iterator[Row]:
    """Yield versions, devices, extras and the backend of the step."""
    import os
    import platform
    from importlib.util import find_spec

    import revisit
    from revisit import settings
    from revisit.eval.spec import version
    from revisit.models import photo

    yield "revisit", revisit.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in ("torch", "transformers", "tokenizers", "pillow", "torchvision"):
        yield name, version(name) or "not installed"
    import torch

    yield "CPUs", f"{os.cpu_count()}, {torch.get_num_threads()} threads in torch"
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{about.name} ({about.total_memory / 2**30:.0f} GB)" for about in devices]
    names += ["mps"] if torch.backends.mps.is_available() else []
    yield "accelerators", ", ".join(names) or "none; models run on the CPU"
    from revisit.step.compiled import kernel

    if kernel.library() is not None:
        yield "ReVisiT's step on CPUs", "in C (compiled at installation)"
    else:
        why = "not compiled here" if settings.compiled_step() else "the C version is turned off by REVISIT_KERNEL"
        yield "ReVisiT's step on CPUs", f"in torch ({why})"
    if torch.cuda.is_available():
        from revisit.step.choice import without_triton

        why_not = without_triton(torch.device("cuda"))
        with_triton = "in Triton (compared with torch when it is first used)"
        yield "ReVisiT's step on GPUs", with_triton if why_not is None else f"in torch ({why_not})"
    extras: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        extras.setdefault(extra, []).append(package)
    extras[photo.NAME] += [part.package for part in photo.PARTS]
    for extra, packages in sorted(extras.items()):
        absent = [package for package in packages if find_spec(package) is None]
        install = photo.INSTALL if extra == photo.NAME else f"pip install 'revisit-decoding[{extra}]'"
        yield f"extra {extra}", f"missing {', '.join(absent)}: {install}" if absent else "installed"
    yield "cache", str(settings.cache_folder())


def machine_warnings() -> Iterator[str]:
    """Yield the problems of this installation, one sentence each."""
    from importlib.util import find_spec

    if find_spec("torchvision") is None:
        yield "torchvision is not installed: videos and the families that `revisit models` marks need it."
    if find_spec("nltk") is not None:
        from revisit.eval.benchmarks.language import require_data

        try:
            require_data()
        except RevisitError as error:
            yield f"CHAIR (except on generated scenes) and AMBER cannot be scored: {error}"


def model_rows(facts: ModelFacts) -> Iterator[Row]:
    """Yield what a model's small files contain."""
    yield "family", f"{facts.model_type} ({facts.family})" if facts.family else f"{facts.model_type} (not tested)"
    yield (
        "decoder",
        f"{facts.depth} layers of width {facts.width}, vocabulary {facts.vocabulary:,}, {facts.dtype or '?'}",
    )
    width, height = facts.image_size
    tokens = "unknown" if facts.vision_tokens is None else f"{facts.vision_tokens:,}"
    yield f"vision tokens of {width}×{height}", tokens
    for name, layers in facts.layers.items():
        memory = facts.state_bytes(name)
        per_image = "" if memory is None else f"; states {memory / 2**20:,.1f} MB per image"
        yield f"layers={name}", f"{_listed(layers)}{per_image}"
    yield "thoughts", " … ".join(facts.thought) if facts.thought else "none: the tokenizer has no tokens for them"
    yield "recommended", ", ".join(f"{key}={value}" for key, value in facts.recommended.items())
    yield "vLLM", "the plug-in supports this family" if facts.vllm else "the plug-in does not support this family"


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) if len(layers) <= 6 else f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"
