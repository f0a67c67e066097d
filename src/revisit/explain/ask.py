"""Answer questions about images and show how each word was chosen: `revisit.ask` and `revisit.ask_many`."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from revisit.decoding.decode import Decoded, decode
from revisit.decoding.generate import beam_count
from revisit.decoding.method import as_method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.explain.check import check_text, settings_of
from revisit.explain.checked import Check
from revisit.explain.lens import patch_words
from revisit.explain.prefill import watch_prefill
from revisit.explain.support import answer_text
from revisit.guard.rates import no_risk, promised_call
from revisit.io.images import ImageList
from revisit.models import DESCRIBE
from revisit.models.config import name_of
from revisit.models.geometry import layout_of
from revisit.models.loading import loaded_pair
from revisit.models.parts import ModelParts
from revisit.models.prompts import need_question, prepare_opened
from revisit.models.reader import OnError, answer_all, open_visuals, opener, paired
from revisit.models.types import Model, Processor
from revisit.pages.answers import AnswerPage
from revisit.pages.document import check_page, notebook_frame, write_page
from revisit.registry import MAX_SEED, Count, Share, validated
from revisit.video.clip import VideoLike, Visual, VisualLike, shown_images
from revisit.video.sampling import Sampling

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import MethodLike
    from revisit.decoding.trace import Trace
else:
    MethodLike = Any  # `as_method` validates methods


LENGTH = 256  # tokens of an answer, unless the caller or a calibration names another number


@dataclass
class ExplainedAnswer:
    """The text of an answer and every step that produced it. Notebooks display the text and the page.

    Attributes:
        page: Every step of every method.
    """

    page: AnswerPage
    _check: Check

    @property
    def _output(self) -> Decoded:
        return self.page.answers[0]

    @property
    def text(self) -> str:
        """The answer, without thoughts; empty if the model did not finish its thought."""
        return self._output.text

    @property
    def thought(self) -> str:
        """The reasoning that the model wrote before its answer."""
        return self._output.thought

    @property
    def unclosed(self) -> bool:
        """Whether the text ended within a thought, so that there is no answer yet."""
        return self._output.unclosed

    @property
    def trace(self) -> Trace:
        """The record of the method, step by step."""
        return self._output.trace

    @property
    def promise(self) -> str:
        """The rate of mistakes that `risk` promised, and what it covers; empty without a risk."""
        return self.page.promise

    @property
    def images(self) -> list[Image]:
        """The images."""
        return self.page.images

    @property
    def compared(self) -> dict[str, str]:
        """The texts of the other methods, by their labels."""
        return {other.trace.label: other.text for other in self.page.answers[1:]}

    @property
    def changed(self) -> list[tuple[int, str, str]]:
        """(step from 1, token, the model's own best token) for every step at which the method changed the best token."""
        changed = [step for step in self._output.steps if step.changed]
        return [(step.step, str(step.text), str(step.instead_of_text)) for step in changed]

    @validated
    def check(self, threshold: Share | None = None) -> Check:
        """Check which words of the answer the image supports, without a forward pass; see `revisit.check`."""
        return self._check if threshold is None else replace(self._check, threshold=threshold)

    def save(self, path: str | Path) -> Path:
        """Write the page (.html); return the path."""
        return write_page(check_page(path), self.page.render())

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        short = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        counts = f"{len(self._output.changed)} of {len(self._output.steps)} steps changed"
        return f"ExplainedAnswer({short!r}, {self._output.trace.name}, {counts})"

    def _repr_html_(self) -> str:
        frame = notebook_frame(self.page.render(), "The decoding run, step by step")
        return f"<p>{html.escape(self.text)}</p>{frame}"


@validated
def ask(
    model: str | Path | Model | tuple[Model, Processor],
    image: VisualLike | Sequence[VisualLike] | None = None,
    question: str | None = None,
    method: MethodLike | None = None,
    *,
    video: VideoLike | Sequence[VideoLike] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    compare_with: MethodLike | Sequence[MethodLike] = (),
    objects: Sequence[str] | None = None,
    max_new_tokens: Count | None = LENGTH,
    risk: Share | None = None,
    calibration: str | Path | None = None,
    any_calibration: bool = False,
    **generate_kwargs: Any,
) -> ExplainedAnswer:
    """Ask a model about an image or a video and record how it chose each word.

    Each method takes one vision pass and one prefill, as in `generate`. The last model that was given by name stays loaded until another
    one is loaded, or until `revisit.unload()`. Load several models yourself:

        model = revisit.load("HuggingFaceTB/SmolVLM-256M-Instruct")
        answer = revisit.ask(model, "photo.jpg", "What is on the table?")
        print(answer)
        answer.save("page.html")

    Args:
        model: A Hub id, a folder, "tiny" (the embedded model), or the pair (model, processor) that `revisit.load` returns.
        image: A path, bytes, a PIL image or an array of pixels; or a list of them, which share one prompt (`ask_many` asks about
            each one separately).
        question: The question; by default, a request to describe the image.
        video: A video or a list of them, instead of the image or after it: a path, a list of frames, or a list of (frame, time)
            pairs.
        frames: How many frames to take from each video, evenly spaced; 8 by default.
        fps: How many frames to take per second, instead of `frames`.
        method: A decoding method: an object such as `revisit.ReVisiT(alpha=1e-3)`, a class, or a name with settings such as
            "revisit:alpha=1e-3". Classes and names use the settings recommended for the model. By default, ReVisiT.
        compare_with: A method, or a list of methods, whose answers are shown next to this one ("greedy" is plain decoding).
        objects: The objects in the image, if known; words for other objects are marked as wrong.
        max_new_tokens: The longest answer, in tokens; None for `max_new_tokens` of the model's generation configuration.
        risk: The rate of mistakes that you accept, if it was certified. Method, question and length then come from the calibration
            unless you name them; what you name must agree with it.
        calibration: The file of `revisit calibrate`; by default the model's own entry.
        any_calibration: Answer even where the calibration does not hold; `promise` then says so.
        **generate_kwargs: As for `generate`, for example `do_sample=True`; `torch.manual_seed` sets the seed.

    Returns:
        The answer: `str(answer)` is its text, `answer.save("page.html")` writes a page, and notebooks display it.

    Raises:
        RevisitError: If the model, the image, the method or an argument cannot be used.
    """
    options = {
        "frames": frames,
        "fps": fps,
        "compare_with": compare_with,
        "objects": objects,
        "max_new_tokens": max_new_tokens,
        "risk": risk,
        "calibration": calibration,
        "any_calibration": any_calibration,
        **generate_kwargs,
    }
    answer = next(ask_many(model, [image], question, method, videos=[video], **options))
    assert isinstance(answer, ExplainedAnswer)
    return answer


@validated
def ask_many(
    model: str | Path | Model | tuple[Model, Processor],
    images: ImageList = None,
    question: str | None = None,
    method: MethodLike | None = None,
    *,
    videos: Sequence[VideoLike | Sequence[VideoLike] | None] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    compare_with: MethodLike | Sequence[MethodLike] = (),
    objects: Sequence[str] | None = None,
    max_new_tokens: Count | None = LENGTH,
    risk: Share | None = None,
    calibration: str | Path | None = None,
    any_calibration: bool = False,
    batch_size: Count = 8,
    errors: OnError = "raise",
    **generate_kwargs: Any,
) -> Iterator[ExplainedAnswer | RevisitError]:
    """Ask the same question about many images or videos, each in its own prompt; images in a nested list share one prompt.

        for answer in revisit.ask_many(model, sorted(Path("photos").glob("*.jpg")), "What is on the table?"):
            print(answer)

    The answers come in the order of the images, as they are finished. Images are opened a batch ahead and then forgotten, so memory does
    not depend on their number.

    `batch_size` images are decoded together; in float32 on a CPU the answers do not depend on it. With
    `errors="return"` an image that cannot be read or answered has a RevisitError in place of its answer, and the others are not
    affected; by default the error is raised. The other arguments are those of `ask`.
    """
    asked = DESCRIBE if question is None else need_question(question)
    items, sampling = paired(images, videos), Sampling(frames, fps)
    if set_here := {"trace", "processor", "custom_generate", "num_return_sequences"} & generate_kwargs.keys():
        raise RevisitError(f"{', '.join(sorted(set_here))} is set by `ask`; remove it.")
    compare_with = () if compare_with is None else compare_with
    more = compare_with if isinstance(compare_with, (list, tuple)) else [compare_with]
    chosen: list[Any] = ["revisit" if method is None else method, *more]
    for entry in chosen:
        as_method(entry)  # before loading, so that mistakes fail at once
    if errors == "raise":
        items[0] = (items[0][0], open_visuals((None, items[0][1]), sampling))  # videos take long to read twice
        open_visuals(items[0], sampling)
    loaded, processor = loaded_pair(model, "ask")
    if beam_count(loaded, generate_kwargs) > 1:
        raise RevisitError(
            "Beam search cannot be shown step by step, because beams are reordered; remove num_beams, or use revisit.generate."
        )
    promise = ""
    if risk is None:
        no_risk(calibration, any_calibration)
    else:
        sampled = bool(generate_kwargs.get("do_sample"))
        length = None if max_new_tokens == LENGTH else max_new_tokens
        promised = promised_call(
            loaded, processor, risk, calibration, any_calibration, method, question, length, plain=not sampled
        )
        chosen[0], asked, max_new_tokens, promise = promised
    methods = [as_method(entry, loaded) for entry in chosen]
    for each in methods:
        if each.own_beams > 1:
            raise RevisitError(f"{each.name} uses beam search and cannot be shown step by step; use another method.")
    options = {"max_new_tokens": max_new_tokens, **generate_kwargs}
    settings = Decoding.take(options, loaded.generation_config)
    processors, criteria = (options.pop(name, None) or () for name in ("logits_processor", "stopping_criteria"))
    layers = sorted({settings_of(loaded)[0], ModelParts.of(loaded).depth})

    def answer(_: object, batch: Sequence[list[Visual]]) -> Iterator[ExplainedAnswer]:
        inputs = prepare_opened(processor, [asked] * len(batch), batch, loaded.device)
        decode_by = partial(
            decode,
            loaded,
            processor,
            inputs,
            settings=settings,
            seeds=torch.randint(MAX_SEED, (len(batch),)).tolist(),  # the same for every method
            processors=processors,
            criteria=criteria,
            record=True,
            **options,
        )
        with watch_prefill(loaded, inputs, layers) as states:
            outputs = [decode_by(method=methods[0])]
        outputs += [decode_by(method=other) for other in methods[1:]]
        for row, answers in enumerate(zip(*outputs, strict=True)):
            layout = layout_of(loaded, processor, batch, inputs, row)
            for step in (step for answer in answers for step in answer.steps):
                region = None if step.vision_token is None else layout.region(step.vision_token)
                if region is not None:
                    step.patch_row, step.patch_col = region.row + 1, region.column + 1
                    step.time = region.time
            tokens = [step.token for step in answers[0].steps if step.token is not None and not step.thought]
            shown = shown_images(batch[row])
            text = answer_text(processor.tokenizer, answers[0].text, tokens, shown, layout, states[row])
            check = check_text(loaded, processor.tokenizer, text)
            words = patch_words(states[row], layers[-1], processor.tokenizer)
            page = AnswerPage(shown, asked, name_of(loaded), layout, list(answers), objects, words, promise)
            yield ExplainedAnswer(page, check)

    return answer_all(items, batch_size, opener(processor, sampling), answer, errors)
