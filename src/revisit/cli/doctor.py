"""`revisit doctor`: check the installation, or a model before it is downloaded."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import revisit
from revisit import settings
from revisit.cli import options
from revisit.cli.checkup import report
from revisit.errors import EXTRAS, RevisitError, install_command
from revisit.eval.spec import version
from revisit.models import photo
from revisit.models.config import load_config

if TYPE_CHECKING:
    from revisit.models.facts import ModelFacts


def doctor(
    model: str = typer.Argument(None, help="Local folder or Hub id of a model to check; weights are not loaded."),
    image_size: tuple[int, int] = typer.Option(
        (640, 480), metavar="WIDTH HEIGHT", help="Image size for which to count vision tokens."
    ),
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    as_json: bool = options.JSON,
    gpu: bool = typer.Option(
        False, "--gpu", help="Compute on the GPU, and compare with the reference; takes a few minutes."
    ),
    with_vllm: bool = typer.Option(False, "--vllm", help="With --gpu, also start vLLM with and without the plug-in."),
    engine: str = typer.Option(None, metavar="URL", help="Address of an OpenAI-compatible server to check."),
    served: str = typer.Option(None, "--model", "-m", help="With --engine, the name of the model on the server."),
    api_key: str = typer.Option(None, envvar=settings.API_KEY, help="With --engine, the server's key."),
    out: Path | None = typer.Option(
        None, help="With --gpu or --engine, write the report as JSON, without paths, prompts or host names."
    ),
) -> None:
    """Check the installation, or whether ReVisiT supports a model before you download it.

    For a model, print its vision tokens, layers and memory. Exit status: 0 if it is supported, 1 if it is not, 2 if it cannot be
    read.

    With --gpu, decode and compare on this machine's GPU. Exit status: 0 if everything is right, 1 if something is wrong, 2 if it is
    right but slow, or if there is no GPU.

    With --engine, check a server: whether the model sees images, what they cost, and which options it honors. A local MODEL is
    compared with the one served. Exit status: 0 if nothing is wrong, 1 if something is, 2 if the server cannot be reached.

    Examples:

      revisit doctor
      revisit doctor llava-hf/llava-1.5-7b-hf --image-size 1024 768 --json
      revisit doctor Qwen/Qwen2.5-VL-7B-Instruct --gpu --vllm --out report.json
      revisit doctor --engine http://127.0.0.1:8000/v1 --model llava-hf/llava-1.5-7b-hf
    """
    if with_vllm and not gpu:
        raise RevisitError("--vllm needs --gpu.")
    if gpu:
        from revisit.cli import gpu_doctor

        raise typer.Exit(report(gpu_doctor.checks(model or "tiny", with_vllm), out))
    if engine is not None:
        from revisit.cli import engine_doctor

        checks = engine_doctor.checks(engine, served, api_key, model)
        raise typer.Exit(report(checks, out))
    if served is not None or out is not None:
        raise RevisitError("--model needs --engine, and --out needs --engine or --gpu.")
    facts, problems, warnings = None, list[str](), list[str]()
    if model is not None:
        load_config(model, trust_remote_code=trust_remote_code)  # a wrong name fails before torch is imported
        from revisit.models.facts import model_facts

        found = model_facts(model, image_size=image_size, trust_remote_code=trust_remote_code)
        facts, problems, warnings = dict(model_rows(found)), list(found.problems), list(found.warnings)
    machine = dict(machine_rows())
    warnings += machine_warnings()
    if as_json:
        options.print_json({"machine": machine, "warnings": warnings, "model": facts, "problems": problems})
    else:
        if facts is not None:
            for reason in problems or ["ReVisiT can be used with this model."]:
                print(f"{'✗' if problems else '✓'} {reason}")
            print()
            options.print_facts(str(model), facts.items())
            print()
        options.print_facts("This machine", machine.items())
        for warning in warnings:
            print(f"! {warning}")
    if problems:
        raise typer.Exit(1)


def machine_rows() -> Iterator[tuple[str, str]]:
    """Yield versions, devices, extras and the backend of the step."""
    yield "revisit", revisit.__version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for name in ("torch", "transformers", "tokenizers", "pillow", "torchvision"):
        yield name, version(name) or "not installed"
    import torch

    yield "CPUs", f"{os.cpu_count()}, torch threads: {torch.get_num_threads()}"
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    names = [f"{device.name} ({device.total_memory / 2**30:.0f} GB)" for device in devices]
    names += ["mps"] if torch.backends.mps.is_available() else []
    yield "accelerators", ", ".join(names) or "none; models run on the CPU"
    if torch.cuda.is_available():
        from revisit.step.choice import without_triton

        why_not = without_triton(torch.device("cuda"))
        with_triton = "in Triton (compared with the reference before its first use)"
        yield "ReVisiT's step on GPUs", with_triton if why_not is None else f"in torch ({why_not})"
    extras: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        extras.setdefault(extra, []).append(package)
    extras[photo.NAME] += [part.package for part in photo.PARTS]
    for extra, packages in sorted(extras.items()):
        absent = [package for package in packages if find_spec(package) is None]
        install = photo.installation() if extra == photo.NAME else install_command([extra])
        yield f"extra {extra}", f"missing {', '.join(absent)}: {install}" if absent else "installed"
    yield "cache", str(settings.cache_folder())


def machine_warnings() -> Iterator[str]:
    """Yield the problems of this installation, one sentence each."""
    if find_spec("torchvision") is None:
        yield "torchvision is not installed: videos and the families that `revisit models` marks need it."
    if find_spec("nltk") is not None:
        from revisit.eval.benchmarks.language import require_data

        try:
            require_data()
        except RevisitError as error:
            yield f"CHAIR (except on generated scenes) and AMBER cannot be scored: {error}"


def model_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield facts from a model's configuration and tokenizer."""
    yield "family", f"{facts.model_type} ({facts.family})" if facts.family else f"{facts.model_type} (not tested)"
    size = f"{facts.depth} layers of width {facts.width}"
    yield "decoder", f"{size}, vocabulary {facts.vocabulary:,}, {facts.dtype or '?'}"
    width, height = facts.image_size
    tokens = "unknown" if facts.vision_tokens is None else f"{facts.vision_tokens:,}"
    yield f"vision tokens of {width}×{height}", tokens
    for name, layers in facts.layers.items():
        memory = facts.state_bytes(name)
        per_image = "" if memory is None else f"; states {memory / 2**20:,.1f} MB per image"
        many = f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"
        yield f"layers={name}", f"{', '.join(map(str, layers)) if len(layers) <= 6 else many}{per_image}"
    yield "thoughts", " … ".join(facts.thought) if facts.thought else "none: the tokenizer has no tokens for them"
    yield "recommended", ", ".join(f"{key}={value}" for key, value in facts.recommended.items())
    yield "vLLM", "the plug-in supports this family" if facts.vllm else "the plug-in does not support this family"
