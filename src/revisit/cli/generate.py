"""`revisit generate`: describe images or answer questions about them, with any decoding method."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from revisit import methods
from revisit.cli import options
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.pages.document import check_page


def generate(
    images: list[str] = typer.Argument(None, help="Image files or folders."),
    prompt: str = options.PROMPT,
    model: str = options.MODEL,
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    max_new_tokens: int = typer.Option(256, min=1, help="Maximum length of an answer, in tokens."),
    sample: bool = options.SAMPLE,
    temperature: float = options.TEMPERATURE,
    top_p: float = options.TOP_P,
    beams: int = options.BEAMS,
    seed: int = typer.Option(0, callback=options.a_seed, help="Random seed, with --sample."),
    together: bool = typer.Option(False, "--together", help="Ask one question about all images together."),
    html: Path = options.HTML,
    compare_with: list[str] = typer.Option(["greedy"], help="Method to compare with on the page, or none. Repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per answer."),
    any_image: bool = options.ANY_IMAGE,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Describe images, or answer a question about each of them.

    Examples:

      revisit generate photo.jpg --model photo
      revisit generate photo.jpg --model photo --html decode.html --compare-with vcd --compare-with greedy
      revisit generate photos/ --model photo --prompt "Is there a dog in the image?" --set alpha=1e-3 --json
    """
    from revisit.models.images import find_images, open_image

    if not images:
        raise RevisitError("No image was given; for example: revisit generate photo.jpg")
    if html is not None and beams > 1:
        raise RevisitError("--html cannot be combined with --beams: the page cannot show beams that change order.")
    if compare_with != ["greedy"] and html is None:
        raise RevisitError("--compare-with needs --html, which shows the other answers.")
    if not prompt.strip():
        raise RevisitError("The prompt is empty; pass a question with --prompt.")
    paths = find_images(images)
    if html is not None:
        check_page(html, paths)
    settings = Decoding.from_options(sample, temperature, top_p, beams).replace(max_new_tokens=max_new_tokens)
    if seed and not sample:
        raise RevisitError("--seed needs --sample: without it every seed gives the same answer.")
    # Files, names and settings are checked before torch is imported and the model is loaded.
    groups = [paths] if together else [[path] for path in paths]
    opened = [[open_image(path) for path in group] for group in groups]
    method, method_settings = options.chosen_method(method, set_)
    others = methods.parse_methods(compare_with) if html is not None else []
    others = [other for other in others if other != (method, method_settings) and other[0] != "none"]
    for name, own in ((method, method_settings), *others):
        methods.get(name, **own)

    import torch

    from revisit import ask
    from revisit.decoding.decode import decode
    from revisit.models.prompts import prepare

    loaded, processor = options.load_for_image(
        model,
        opened[0][0],
        paths[0],
        any_image=any_image,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_incomplete=allow_incomplete,
    )
    chosen = methods.as_method(method, loaded, **method_settings)
    compared = list(dict.fromkeys(methods.as_method(name, loaded, **own) for name, own in others))
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
    if sample:
        generation |= {"temperature": temperature, "top_p": top_p}
    for number, group in enumerate(groups):
        torch.manual_seed(seed)
        if html is not None:
            page = ask((loaded, processor), opened[number], prompt, chosen, compare_with=compared, **generation).page
            answer = page.answers[0]
        else:
            inputs = prepare(processor, [prompt], [opened[number]], device=loaded.device)
            (answer,) = decode(loaded, processor, inputs, chosen, settings)
        if as_json:
            beams = max(beams, chosen.own_beams)
            result = {
                "images": group,
                "prompt": prompt,
                "text": answer.text,
                "thought": answer.thought,
                "unclosed": answer.unclosed,
                "model": model,
                "method": answer.trace.method,
                "generation": {**generation, "num_beams": beams, "seed": seed},
                "counters": answer.trace.summary(),
            }
            options.print_json(result)
        else:
            print(f"{', '.join(group)}: {answer.text}" if len(groups) > 1 else answer.text, flush=True)
        if answer.unclosed:
            print(
                f"No answer: the thought did not end within {max_new_tokens} tokens; use a larger --max-new-tokens.",
                file=sys.stderr,
            )
        if html is not None:
            several = html.with_name(f"{html.stem}-{number + 1}{html.suffix}")
            print(f"Wrote {page.write(several if len(groups) > 1 else html)}", file=sys.stderr)
