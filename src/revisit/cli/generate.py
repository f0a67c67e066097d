"""`revisit generate`: describe images and videos or answer questions about them, with any decoding method."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from revisit import methods
from revisit.cli import options
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import Incomplete, RevisitError
from revisit.io.records import Fields
from revisit.pages.document import check_page
from revisit.registry import MAX_SEED
from revisit.video.sampling import Sampling

if TYPE_CHECKING:
    from revisit.decoding.decode import Decoded
    from revisit.models.types import Model, Processor
    from revisit.pages.answers import AnswerPage
    from revisit.video.clip import Visual

LINES = "answers.jsonl"
Group = tuple[str, ...]  # the images and videos of one prompt
Frames = list[dict[str, float]]  # index and time of each frame of the videos
Told = tuple["list[Decoded]", Frames, "AnswerPage | None"]  # the answers of all methods
Failure = tuple[str, str]  # the names of the images, and the reason
Advance = Callable[[int, int], None]


def generate(
    context: typer.Context,
    images: list[str] = typer.Argument(None, help="Images, videos or folders."),
    prompt: str = options.PROMPT,
    model: str = options.MODEL,
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    max_new_tokens: int = typer.Option(256, min=1, help="Maximum length of an answer, in tokens."),
    sample: bool = options.SAMPLE,
    temperature: float = options.TEMPERATURE,
    top_p: float = options.TOP_P,
    beams: int = options.BEAMS,
    seed: int = typer.Option(0, callback=options.validate_seed, help="Random seed, with --sample."),
    frames: int = options.FRAMES,
    fps: float = options.FPS,
    together: bool = typer.Option(False, "--together", help="Ask one question about all images together."),
    batch_size: int = options.BATCH_SIZE,
    risk: float = options.RISK,
    calibration: Path = options.CALIBRATION,
    any_calibration: bool = options.ANY_CALIBRATION,
    output: Path = typer.Option(
        None, "--out", "-o", help="Folder for answers.jsonl, with one line per answer; rerun the command to resume."
    ),
    html: Path = options.HTML,
    compare_with: list[str] = typer.Option(
        ["greedy"], help="Method whose answer is shown too, or none. Repeatable; by default greedy with --html."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per answer."),
    quiet: bool = options.QUIET,
    any_image: bool = options.ANY_IMAGE,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Describe images or videos, or answer a question about each of them.

    Images that cannot be read or answered are listed at the end, with exit status 3; the others are answered.

    Examples:

      revisit generate photo.jpg --model photo
      revisit generate photo.jpg --model photo --html decode.html --compare-with vcd --compare-with greedy
      revisit generate photos/ --model photo --prompt "Is there a dog in the image?" --set alpha=1e-3 --json
      revisit generate photos/ --model photo --out answers
      revisit generate clip.mp4 --frames 8 --model Qwen/Qwen3-VL-2B-Instruct
    """
    from revisit.cli.progress import counted, resumable
    from revisit.io.images import find_images
    from revisit.models.reader import open_visuals

    if not images:
        raise RevisitError("No image was given; for example: revisit generate photo.jpg")
    if html is not None and beams > 1:
        raise RevisitError("--html cannot be combined with --beams: the page cannot show beams that change order.")
    if output is not None and (html is not None or as_json or options.named(context, "compare_with")):
        raise RevisitError(
            "--out cannot be combined with --html, --json or --compare-with; the lines of its file are JSON."
        )
    if not prompt.strip():
        raise RevisitError("The prompt is empty; pass a question with --prompt.")
    paths = find_images(images)
    if html is not None:
        check_page(html, paths)
    method, settings = options.chosen_method(method, set_)
    promised = options.promised_call(context, risk, calibration, any_calibration, method, settings)
    if promised is not None:
        method, settings, prompt, max_new_tokens = (
            promised.method,
            promised.settings,
            promised.prompt,
            promised.max_new_tokens,
        )
    decoding = Decoding.from_options(sample, temperature, top_p, beams).replace(max_new_tokens=max_new_tokens)
    if seed and not sample:
        raise RevisitError("--seed needs --sample: without it every seed gives the same answer.")
    if html is None and not options.named(context, "compare_with"):
        compare_with = []
    others = methods.parse_methods([name for name in compare_with if name != "none"])
    others = [other for other in others if other != (method, settings)]
    groups: list[Group] = [tuple(paths)] if together else [(path,) for path in dict.fromkeys(paths)]
    sampling = Sampling(frames, fps)
    if len(groups) == 1:
        open_visuals((groups[0], None), sampling)
    # Files, names and settings are checked before torch is imported and the model is loaded.
    given, *_ = (methods.get(name, **own) for name, own in ((method, settings), *others))
    loading = {"dtype": dtype, "device_map": device_map}
    job = Job(
        model,
        prompt,
        groups,
        [(method, settings), *others],
        decoding,
        sampling,
        {
            "max_new_tokens": max_new_tokens,
            "do_sample": sample,
            **({"temperature": temperature, "top_p": top_p} if sample else {}),
            "num_beams": max(beams, given.own_beams),
            "seed": seed,
        },
        partial(
            options.load_for_image,
            model,
            any_image=any_image,
            trust_remote_code=trust_remote_code,
            allow_incomplete=allow_incomplete,
            **loading,
        ),
        promised,
    )
    with resumable(output), counted("images", len(groups), quiet or len(groups) == 1) as advance:
        if output is None:
            failures = job.show(advance, batch_size, as_json, html)
        else:
            failures = job.store(advance, batch_size, output, options.identity(model, **loading), given)
    if failures and len(groups) == 1:
        raise RevisitError(failures[0][1])
    if failures:
        options.print_failures(failures)
        raise Incomplete(f"{len(failures)} of {len(groups)} images have no answer; rerun the command to retry.")


@dataclass(frozen=True)
class Job:
    """One question about the images of each group."""

    model: str
    prompt: str
    groups: list[Group]
    methods: Sequence[tuple[str, Fields]]  # the first one answers; the others are compared with it
    decoding: Decoding
    sampling: Sampling
    generation: Fields  # as in the output
    load: Callable[..., tuple[Model, Processor]]
    promised: options.PromisedCall | None = None

    def answers(self, missing: Sequence[int], batch_size: int, pages: bool) -> Iterator[list[Any]]:
        """Yield the numbered groups with the hashes of their files and their results or errors, batch by batch.

        A result has the answers of all methods, the frames of the videos, and a page if wanted.
        """
        from revisit.models.reader import answer_missing, open_visuals

        def probe(group: Group) -> list[Visual]:
            return open_visuals((group, None), self.sampling)

        start = partial(self.start, pages=pages)
        return answer_missing(self.groups, missing, batch_size, lambda group: group, probe, start)

    def start(
        self, group: Group, visuals: list[Visual], *, pages: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Load the model; return the functions that open the files of a group and that answer a batch of groups."""
        import torch

        from revisit import ask
        from revisit.decoding.decode import decode
        from revisit.models.prompts import prepare_opened
        from revisit.models.reader import opener
        from revisit.video.clip import frames_listing

        pair = self.load(visuals[0], group[0])
        chosen, *others = (methods.as_method(name, pair[0], **settings) for name, settings in self.methods)
        if self.promised is not None:
            chosen = self.promised.check(*pair, chosen)
        torch.manual_seed(self.generation["seed"])
        seed = int(torch.randint(MAX_SEED, (1,)))
        sampling = {name: value for name, value in self.generation.items() if name not in ("seed", "num_beams")}

        def answer(groups: Sequence[Group], opened: Sequence[list[Visual]]) -> Iterator[Told]:
            inputs = prepare_opened(pair[1], [self.prompt] * len(groups), opened, pair[0].device)
            seeds = [seed] * len(groups)
            answers = [decode(*pair, inputs, method, self.decoding, seeds=seeds) for method in (chosen, *others)]
            for visuals, *told in zip(opened, *answers, strict=True):
                yield told, frames_listing(visuals), None

        def explain(groups: Sequence[Group], opened: Sequence[list[Visual]]) -> Iterator[Told]:
            for visuals in opened:
                torch.manual_seed(self.generation["seed"])
                compared = list(dict.fromkeys(others))
                told = ask(pair, visuals, self.prompt, chosen, compare_with=compared, **sampling)
                yield told.page.answers, frames_listing(visuals), told.page

        open_all = opener(pair[1], self.sampling)
        return lambda group: open_all((group, None)), explain if pages else answer

    def line(self, group: Group, hash: str | None, result: Told | RevisitError) -> Fields:
        """Return an answer or its error as JSON values."""
        if isinstance(result, RevisitError):
            return {"images": list(group), "error": str(result)}
        (answer, *others), frames, _ = result
        return {
            "images": list(group),
            **({"frames": frames} if frames else {}),
            "prompt": self.prompt,
            "text": answer.text,
            "thought": answer.thought,
            "unclosed": answer.unclosed,
            "model": self.model,
            "method": answer.trace.method,
            "generation": self.generation,
            "counters": answer.trace.summary(),
            "hash": hash,
            **({"compared": {other.trace.label: other.text for other in others}} if others else {}),
            **({} if self.promised is None else {"promise": self.promised.note}),
        }

    def show(self, advance: Advance, batch_size: int, as_json: bool, html: Path | None) -> list[Failure]:
        """Print the answers and write their pages; return the groups that failed."""
        several, failures, number = len(self.groups) > 1, list[Failure](), 0
        for batch in self.answers(range(len(self.groups)), batch_size if html is None else 1, html is not None):
            for group, hash, result in batch:
                number += 1
                name = ", ".join(group)
                if isinstance(result, RevisitError):
                    failures.append((name, str(result)))
                    if as_json and several:
                        options.print_json(self.line(group, None, result))
                    continue
                (answer, *others), _, page = result
                if as_json:
                    options.print_json(self.line(group, hash, result))
                else:
                    print(f"{name}: {answer.text}" if several else answer.text, flush=True)
                    for other in others:
                        print(f"{other.trace.label}: {other.text}", flush=True)
                if answer.unclosed:
                    advice = f"the thought did not end within {self.decoding.max_new_tokens} tokens; use a larger --max-new-tokens."
                    print(f"No answer: {advice}", file=sys.stderr)
                if page is not None and html is not None:
                    file = html.with_name(f"{html.stem}-{number}{html.suffix}") if several else html
                    print(f"Wrote {page.write(file)}", file=sys.stderr)
            advance(len(batch), sum(isinstance(result, RevisitError) for *_, result in batch))
        return failures

    def store(self, advance: Advance, batch_size: int, output: Path, identity: Fields, method: Method) -> list[Failure]:
        """Add the answers that a folder does not have yet; return the groups that failed."""
        from revisit.io.results import Results
        from revisit.models.identity import foreign_code

        settings = {**identity, "prompt": self.prompt, "generation": self.generation, "method": self.methods[0]}
        settings["sampling"] = [self.sampling.frames, self.sampling.fps]
        settings["code"] = sorted(foreign_code(method))
        with closing(Results(output / LINES, settings, lambda line: tuple(line["images"]))) as results:
            missing = results.missing((group, group) for group in self.groups)
            advance(len(self.groups) - len(missing), 0)
            answers = self.answers(missing, batch_size, pages=False)
            failures = results.fill(self.groups, ([self.line(*entry) for entry in batch] for batch in answers), advance)
        print(f"{len(self.groups) - len(failures)} answers, {len(failures)} failures: {output}")
        return [(", ".join(line["images"]), line["error"]) for line in failures]
