"""From pictures and a question to answers that can be looked at: `revisit.ask` and `revisit.ask_many`."""

from __future__ import annotations

import html
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.decoding.method import as_method, refuse_settings
from revisit.embedded.familiar import advice
from revisit.errors import RevisitError, as_path, need
from revisit.explain import figure, page
from revisit.explain.check import Check, check_answer
from revisit.explain.record import Decode, MethodOutput, explain_many, label
from revisit.models import DESCRIBE
from revisit.models.config import name_of
from revisit.models.images import open_image
from revisit.models.loading import loaded_pair

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import MethodLike
    from revisit.decoding.trace import Trace
    from revisit.models.types import ImageLike, Model, Processor


def ask(
    model: str | Path | Model | tuple[Model, Processor],
    image: ImageLike | Sequence[ImageLike],
    question: str = DESCRIBE,
    method: MethodLike = "revisit",
    *,
    compare_with: MethodLike | Sequence[MethodLike] = (),
    objects: Sequence[str] | None = None,
    max_new_tokens: int = 256,
    **generate_kwargs: Any,
) -> Answer:
    """Ask a model about a picture and see how it chose each word.

    Decoding takes one vision pass and one prefill, as `generate` does, and so does each method of `compare_with`. What a page
    shows beyond the recorded steps is computed when it is written.

    A name loads the model at each call and releases it afterwards. For several questions load it once:

        model = revisit.load("HuggingFaceTB/SmolVLM-256M-Instruct")
        answer = revisit.ask(model, "photo.jpg", "What is on the table?")
        print(answer)
        answer.save("page.html")

    Args:
        model: A Hub id, a folder, "tiny" (the embedded model), or the pair (model, processor) that `revisit.load` returns.
        image: A path, bytes, a PIL image or an array of pixels; or a list of them, which share one prompt (`ask_many` asks about
            each on its own).
        question: What to ask; by default, to describe the image.
        method: The decoding method: an object such as `revisit.ReVisiT(alpha=1e-3)`, a class, or a name with settings such as
            "revisit:alpha=1e-3". Classes and names take the settings recommended for the model.
        compare_with: A method, or a list of methods, whose answers are shown next to this one ("greedy" is plain decoding).
        objects: The objects in the picture, if known; words for other objects are marked as wrong.
        max_new_tokens: The longest answer, in tokens.
        **generate_kwargs: Passed to `generate`, for example `do_sample=True`.

    Returns:
        The answer: `str(answer)` is its text, `answer.save("page.html")` writes a page, and a notebook displays it.

    Raises:
        RevisitError: If the model, the image, the method or an argument cannot be used.
    """
    answer = _ask(model, [image], question, method, compare_with, objects, max_new_tokens, 1, generate_kwargs)[0]
    if len(answer.images) > 1:
        answer.notes.append(
            f"{len(answer.images)} pictures share this prompt; revisit.ask_many asks about each of them on its own."
        )
    for note in answer.notes:
        warnings.warn(note, stacklevel=2)
    return answer


def ask_many(
    model: str | Path | Model | tuple[Model, Processor],
    images: Sequence[ImageLike | Sequence[ImageLike]],
    question: str = DESCRIBE,
    method: MethodLike = "revisit",
    *,
    compare_with: MethodLike | Sequence[MethodLike] = (),
    max_new_tokens: int = 256,
    batch_size: int = 8,
    **generate_kwargs: Any,
) -> list[Answer]:
    """Ask the same question about many pictures, each in a prompt of its own.

    Example:
        >>> for answer in revisit.ask_many(model, sorted(Path("photos").glob("*.jpg")), "What is on the table?"):
        ...     print(answer)

    Args:
        model: As for `ask`.
        images: The pictures; an entry that is a list puts its pictures into one prompt.
        question: What to ask about each.
        method: As for `ask`.
        compare_with: As for `ask`.
        max_new_tokens: The longest answer, in tokens.
        batch_size: Pictures that are decoded together. In float32 on a CPU the answers do not depend on it, unless tokens are
            sampled.
        **generate_kwargs: Passed to `generate`.

    Returns:
        One answer per picture, in order.

    Raises:
        RevisitError: If the model, an image, the method or an argument cannot be used.
    """
    if not isinstance(images, (list, tuple)):
        raise RevisitError(f"ask_many takes a list of pictures, not {type(images).__name__}; ask takes one.")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise RevisitError(f"batch_size must be a whole number of at least 1, not {batch_size!r}.")
    answers = _ask(model, images, question, method, compare_with, None, max_new_tokens, batch_size, generate_kwargs)
    for note in dict.fromkeys(note for answer in answers for note in answer.notes):
        warnings.warn(note, stacklevel=2)
    return answers


def _ask(
    model: str | Path | Model | tuple[Model, Processor],
    images: Sequence[ImageLike | Sequence[ImageLike]],
    question: str,
    method: MethodLike,
    compare_with: MethodLike | Sequence[MethodLike],
    objects: Sequence[str] | None,
    max_new_tokens: int,
    batch_size: int,
    generate_kwargs: dict[str, Any],
) -> list[Answer]:
    if not isinstance(question, str) or not question.strip():
        raise RevisitError(f"The question must be a non-empty text, not {question!r}.")
    given: list[list[Any]] = [list(entry) if isinstance(entry, (list, tuple)) else [entry] for entry in images]
    if not given or not all(given):
        raise RevisitError("No image: pass at least one.")
    if objects is not None and (
        not isinstance(objects, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in objects)
    ):
        raise RevisitError(f"objects must be a list of the objects in the picture, such as ['cat'], not {objects!r}.")
    refuse_settings(as_method(method), generate_kwargs)  # before the model is loaded: what is wrong fails at once
    pictures = [[open_image(image) for image in entry] for entry in given]
    by_name = isinstance(model, (str, Path))
    loaded, processor = loaded_pair(model, "ask")
    name = str(model) if isinstance(model, (str, Path)) and not Path(model).is_dir() else name_of(loaded)
    others: list[Any] = list(compare_with) if isinstance(compare_with, (list, tuple)) else [compare_with]
    methods = [as_method(entry, loaded) for entry in (method, *others)]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, **generate_kwargs}
    found = []
    for start in range(0, len(pictures), batch_size):
        batch = pictures[start : start + batch_size]
        for decode in explain_many(
            loaded, processor, batch, question, methods, model_name=name, objects=objects, **options
        ):
            found.append(Answer(decode, [advice()] if decode.unfamiliar else []))
    if by_name:
        for answer in found:
            _ = answer.decode.patch_words, answer.check()  # the last chance: nobody else holds the model
    return found


@dataclass
class Answer:
    """What `ask` returns: the text, what the method did, and pages and pictures of it.

    A notebook displays the text and the page. An answer does not keep the model alive; a page written after the model was
    released says that it lacks what each patch says.

    Attributes:
        decode: Every step of every method.
        notes: What a reader should know, such as a picture that the embedded model cannot know.
    """

    decode: Decode
    notes: list[str] = field(default_factory=list)

    @property
    def _output(self) -> MethodOutput:
        return self.decode.answers[0]

    @property
    def text(self) -> str:
        """The answer."""
        return self._output.text

    @property
    def trace(self) -> Trace:
        """What the method did, step by step."""
        assert self._output.trace is not None  # `explain` keeps it
        return self._output.trace

    @property
    def images(self) -> list[Image]:
        """The pictures."""
        return self.decode.images

    @property
    def compared(self) -> dict[str, str]:
        """The texts of the methods that were compared with, by their labels."""
        return {label(other.method): other.text for other in self.decode.answers[1:]}

    @property
    def changed(self) -> list[tuple[int, str, str]]:
        """(step from 1, the token, the model's own best token) wherever the method changed the best token."""
        steps = self._output.steps
        return [(n + 1, steps[n].text, str(steps[n].instead_of)) for n in self._output.changed]

    @cached_property
    def _check(self) -> Check:
        return check_answer(self.decode)

    def check(self, threshold: float | None = None) -> Check:
        """Which words of the answer does the picture support? Needs no forward pass: see `revisit.check`."""
        return self._check if threshold is None else replace(self._check, threshold=threshold)

    def save(self, path: str | Path) -> Path:
        """Write the page (.html), a figure (.png, .svg, .pdf) or the trace (.json); returns the path."""
        path = as_path(path)
        if path.suffix.lower() == ".json":
            return self.trace.save(path)
        if path.suffix.lower() in (".png", ".svg", ".pdf"):
            need("matplotlib")
            return figure.save(figure.decode_figure(self.decode), path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise RevisitError(f"Cannot save an answer as {path}: use .html, .png, .svg, .pdf or .json.")
        return page.write(path, self.decode)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        short = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        counts = f"{len(self._output.changed)} of {len(self._output.steps)} steps changed"
        return f"Answer({short!r}, {self._output.name}, {counts})"

    def _repr_html_(self) -> str:
        texts = "".join(f"<p>{html.escape(text)}</p>" for text in (self.text, *self.notes))
        frame = html.escape(page.render(self.decode), quote=True)
        return (
            f"{texts}<iframe srcdoc='{frame}' sandbox='allow-scripts' style='width:100%;height:720px;border:1px solid #ccc' "
            "title='The decode, step by step'></iframe>"
        )
