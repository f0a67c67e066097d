"""Check which words of a text its image supports: `revisit.check` and `revisit.check_many`.

`checkable.py` selects the words to check, and `support.py` measures their support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.explain.checkable import Words, need_words, word_test
from revisit.explain.checked import Check
from revisit.explain.support import ModelText, read_texts, support
from revisit.guard.rates import find_rate, no_risk
from revisit.io.images import ImageList, TextList
from revisit.models import DESCRIBE
from revisit.models.config import name_of
from revisit.models.loading import loaded_pair
from revisit.models.parts import ModelParts
from revisit.models.prompts import chat_text, check_no_image_tokens, encode, need_question
from revisit.models.reader import OnError, Sources, answer_all, open_visuals, opener, paired
from revisit.models.types import Model, Processor, Tokenizer
from revisit.registry import Count, Share, validated
from revisit.video.clip import VideoLike, Visual, VisualLike
from revisit.video.sampling import Sampling

THRESHOLD = 0.05  # for models that recommend none
TRUSTED = 0.8  # below this AUROC, measured on the model itself, a check carries a warning


@validated
def check(
    model: str | Path | Model | tuple[Model, Processor],
    image: VisualLike | Sequence[VisualLike] | None = None,
    text: str = "",
    prompt: str | None = None,
    *,
    video: VideoLike | Sequence[VideoLike] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    threshold: Share | None = None,
    words: Words = "objects",
    risk: Share | None = None,
    calibration: str | Path | None = None,
    any_calibration: bool = False,
) -> Check:
    """Check the words of a text, from any source, against an image in one forward pass.

        checked = revisit.check(model, "photo.jpg", "A dog on a couch.")
        print(checked.flagged())
        checked.save("page.html")

    Args:
        model: A Hub id, a folder, "tiny", or the pair (model, processor) that `revisit.load` returns.
        image: A path, bytes, a PIL image or an array of pixels; or a list of them, used together in one prompt.
        text: The text to check.
        prompt: The question that the text answers; by default, a request to describe the image.
        video: A video or a list of them, as in `ask`; its words have the time of the frame that supports them.
        frames: How many frames to take from each video; 8 by default.
        fps: How many frames to take per second, instead of `frames`.
        threshold: Words with less support are flagged; by default the model's recommendation (`check` in its
            generation_config.json), or 0.05.
        words: The words to check: "objects" (names of objects in CHAIR's list, the set that was measured), "content" (all except
            function words, counts and digits), or a list of words.
        risk: The rate of texts with an absent object that you accept in `Check.kept()`; its threshold was calibrated.
        calibration: The file of `revisit calibrate --bound expectation`; by default the model's own entry.
        any_calibration: Check even where the calibration does not hold; a note then says so.

    Returns:
        The words with their support.

    Raises:
        RevisitError: If the model, the image, the text or an argument cannot be used.
    """
    taken: dict[str, Any] = {"videos": [video], "frames": frames, "fps": fps}
    taken |= {"risk": risk, "calibration": calibration, "any_calibration": any_calibration}
    checked = next(check_many(model, [image], [text], prompt, **taken, threshold=threshold, words=words))
    assert isinstance(checked, Check)
    return checked


@validated
def check_many(
    model: str | Path | Model | tuple[Model, Processor],
    images: ImageList = None,
    texts: TextList = (),
    prompt: str | None = None,
    *,
    videos: Sequence[VideoLike | Sequence[VideoLike] | None] | None = None,
    frames: int | None = None,
    fps: float | None = None,
    threshold: Share | None = None,
    words: Words = "objects",
    batch_size: Count = 8,
    errors: OnError = "raise",
    risk: Share | None = None,
    calibration: str | Path | None = None,
    any_calibration: bool = False,
) -> Iterator[Check | RevisitError]:
    """Check several texts, each against its own image or list of images, `batch_size` in one forward pass; see `check`.

    The checks come in the order of the texts, as they are finished. With `errors="return"` a text that cannot be checked has a
    RevisitError in place of its check.
    """
    items, sampling = paired(images, videos), Sampling(frames, fps)
    if len(items) != len(texts):
        raise RevisitError(f"Each text needs its own image, but there are {len(items)} images and {len(texts)} texts.")
    question = DESCRIBE if prompt is None else need_question(prompt)
    if errors == "raise" and texts:
        list(map(need_words, texts))
        open_visuals(items[0], sampling)
    loaded, processor = loaded_pair(model, "check")
    promise = ""
    if risk is None:
        no_risk(calibration, any_calibration)
    else:
        if threshold is not None or words != "objects":
            raise RevisitError("The risk sets the threshold, for objects of the list: leave out threshold and words.")
        rate = find_rate(loaded, risk, calibration, "expectation")
        question = rate.prompt if prompt is None else question
        promise = rate.checked(loaded, processor, None, question, any_calibration=any_calibration)
        threshold = rate.threshold
    open_pair, check_batch = checker(loaded, processor, question, threshold, words, sampling, promise)
    return answer_all(list(zip(items, texts, strict=True)), batch_size, open_pair, check_batch, errors)


Pair = tuple[Sources, str]  # images and videos, and a text


def checker(
    model: Model,
    processor: Processor,
    prompt: str,
    threshold: float | None = None,
    words: Words = "objects",
    sampling: Sampling = Sampling(),  # noqa: B008 - it is frozen
    note: str = "",
) -> tuple[Callable[[Pair], list[Visual]], Callable[[Sequence[Pair], Sequence[list[Visual]]], Iterator[Check]]]:
    """Return the functions that open the images of a pair, and that check a batch of pairs."""
    check_no_image_tokens(processor, "prompt", prompt)
    layer, open_for_model = settings_of(model)[0], opener(processor, sampling)

    def open_pair(pair: Pair) -> list[Visual]:
        need_words(pair[1])
        return open_for_model(pair[0])

    def check_batch(pairs: Sequence[Pair], batch: Sequence[list[Visual]]) -> Iterator[Check]:
        prompts = [chat_text(processor, prompt, group) for group in batch]
        inputs = encode(processor, prompts, batch, model.device)
        read = read_texts(model, processor, inputs, prompts, batch, [text for _, text in pairs], [layer])
        checks = (check_text(model, processor.tokenizer, text, threshold, words) for text in read)
        return (replace(check, notes=[note, *check.notes]) if note else check for check in checks)

    return open_pair, check_batch


def check_text(
    model: Model, tokenizer: Tokenizer, text: ModelText, threshold: float | None = None, words: Words = "objects"
) -> Check:
    """Check a text that the model has read or generated."""
    layer, threshold, notes = settings_of(model, threshold)
    supported = support(text, layer, tokenizer, word_test(words))
    if not any(word.checkable for word in supported):
        reason = ": the default set is English names of objects; words (--words) selects others"
        notes.append(f"No word was checked{reason if words == 'objects' else ''}.")
    return Check(text.text, supported, threshold, name_of(model), text.images, notes)


def settings_of(model: Model, threshold: float | None = None) -> tuple[int, float, list[str]]:
    """Return the layer and the threshold of `check` in the model's generation_config.json, and caveats for the reader."""
    depth = ModelParts.of(model).depth
    entry = getattr(model.generation_config, "check", None) or {}
    try:
        layer, recommended, auroc = entry.get("layer", depth), entry.get("threshold", THRESHOLD), entry.get("auroc", 1)
        valid = layer in range(depth + 1) and 0 <= recommended <= 1 and 0 <= auroc <= 1
    except (AttributeError, TypeError):
        valid = False
    if not valid:
        raise RevisitError(
            f"`check` in the model's generation_config.json must have a layer from 0 to {depth}, and a threshold and an auroc from 0 to 1."
        )
    notes = []
    if threshold is None and "threshold" not in entry:
        notes.append(
            f"This model has no recommended threshold, and its accuracy was not measured: {THRESHOLD} is a guess. Compare supports "
            "instead, or run `revisit calibrate --data DATA`."
        )
    if auroc < TRUSTED:
        notes.append(
            f"Checks by this model are unreliable: its AUROC for present against absent objects is {auroc:.2f}."
        )
    return layer, recommended if threshold is None else threshold, notes
