"""One call from a picture and a question to an answer that can be looked at: `revisit.ask`."""

from __future__ import annotations

import html
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError, as_path
from revisit.models.prompts import DESCRIBE

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.trace import Trace
    from revisit.explain.record import Decode, Step


def ask(
    model: Any,
    image: Any,
    question: str = DESCRIBE,
    method: Any = "revisit",
    *,
    versus: Any = (),
    shown: Sequence[str] | None = None,
    max_new_tokens: int = 256,
    **generate_kwargs: Any,
) -> Answer:
    """Ask a model about a picture, decode with a method, and keep what it did.

    model: a name or path (the last one named stays loaded), or a (model, processor) pair.
    image: a path, bytes, a PIL image, an array of pixels, or a list of them that go into one prompt.
    method: a method, its class, or its name with settings such as "revisit:alpha=1e-3"; a class or name takes what is
        recommended for the model.
    versus: other methods whose answers are shown beside this one.
    shown: the objects that are in the picture, where that is known; words for others are marked as wrong.

    Other arguments go to `generate`, for example `do_sample=True`.
    """
    from revisit.decoding.registry import as_method, refuse_settings
    from revisit.explain.record import explain, name_of
    from revisit.models.images import open_image

    if not isinstance(question, str) or not question.strip():
        raise RevisitError(f"The question must be a text that asks something, not {question!r}.")
    given = list(image) if isinstance(image, (list, tuple)) else [image]
    if not given:
        raise RevisitError("No image was given: ask needs at least one.")
    if shown is not None and (
        not isinstance(shown, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in shown)
    ):
        raise RevisitError(f"shown must be a list of the objects in the picture, such as ['cat'], not {shown!r}.")
    refuse_settings(as_method(method), generate_kwargs)  # before the model is loaded: what is wrong fails at once
    pictures = [open_image(entry) for entry in given]
    loaded, processor = _loaded(model)
    name = str(model) if isinstance(model, (str, Path)) and not Path(model).is_dir() else name_of(loaded)
    others = list(versus) if isinstance(versus, (list, tuple)) else [versus]
    methods = [as_method(entry, loaded) for entry in (method, *others)]
    notes = _notes(name, loaded, processor, pictures)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, **generate_kwargs}
    return Answer(
        explain(loaded, processor, pictures, question, methods, model_name=name, shown=shown, **options), notes
    )


@dataclass
class Answer:
    """What `ask` returns: the text, what the method did, and pages and pictures of it.

    In a notebook it shows itself: the picture, the text with changed words marked, and the page that can be walked through.
    """

    decode: Decode
    # what a reader should know, such as a model that cannot know the picture
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The answer."""
        return self.decode.answers[0].text

    @property
    def trace(self) -> Trace:
        """What the method did, step by step."""
        trace = self.decode.answers[0].trace
        assert trace is not None  # `explain` keeps it
        return trace

    @property
    def images(self) -> list[Image]:
        """The pictures, as the model was shown them."""
        return self.decode.images

    @property
    def versus(self) -> dict[str, str]:
        """The answers of the other methods, by their labels."""
        from revisit.explain.record import label

        return {label(other.method): other.text for other in self.decode.answers[1:]}

    @property
    def changed(self) -> list[tuple[int, str, str]]:
        """(step from 1, the token, what the model alone would have preferred) wherever the method changed the best token."""
        answer = self.decode.answers[0]
        return [(n + 1, answer.steps[n].text, str(answer.steps[n].instead_of)) for n in answer.changed]

    def save(self, path: str | Path) -> Path:
        """Write the page (.html), a figure (.png, .svg, .pdf) or the trace (.json); returns the path."""
        path = as_path(path)
        if path.suffix.lower() == ".json":
            return self.trace.save(path)
        if path.suffix.lower() in (".png", ".svg", ".pdf"):
            from revisit.errors import need
            from revisit.explain import figure

            need("matplotlib")
            return figure.save(figure.decode_figure(self.decode), path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise RevisitError(f"An answer is saved as .html, .png, .svg, .pdf or .json; {path} ends in none of them.")
        from revisit.explain import page

        return page.write(path, self.decode)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        answer = self.decode.answers[0]
        short = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"Answer({short!r}, {answer.name}, {len(answer.changed)} of {len(answer.steps)} steps changed)"

    def _repr_html_(self) -> str:
        from revisit.explain import page
        from revisit.pages.document import data_uri

        notes = "".join(f"<p><em>{html.escape(note)}</em></p>" for note in self.notes)
        pictures = "".join(
            f'<img src="{data_uri(image, 320)}" alt="The image that was asked about" style="max-width:320px;margin-right:16px">'
            for image in self.images
        )
        texts = "".join(
            f"<p><b>{html.escape(answer.name)}:</b> {''.join(map(_marked, answer.steps))}</p>"
            for answer in self.decode.answers
        )
        frame = html.escape(page.render(self.decode), quote=True)
        return (
            f"<div>{notes}<div style='display:flex;flex-wrap:wrap;gap:8px'>{pictures}<div style='flex:1 1 300px'>{texts}</div></div>"
            f"<details><summary>Step by step</summary><iframe srcdoc='{frame}' sandbox='allow-scripts' "
            "style='width:100%;height:720px;border:1px solid #ccc' title='The decode, step by step'></iframe></details></div>"
        )


def _marked(step: Step) -> str:
    """One token of the answer; underlined with what would have been written instead, where the method changed it."""
    text = html.escape(step.text)
    if step.text.strip().startswith("<") and step.text.strip().endswith(">"):
        return ""
    if step.wrong:
        text = f"<span style='color:#b00020;text-decoration:underline wavy' title='not in the picture'>{text}</span>"
    if step.instead_of is None:
        return text
    return f"<mark title='instead of {html.escape(step.instead_of.strip(), quote=True)}'>{text}</mark>"


def _loaded(model: Any) -> tuple[Any, Any]:
    """(model, processor) of a name, a path or such a pair."""
    from revisit.models.processors import processor_of

    if isinstance(model, (str, Path)):
        return _load(str(model))
    if isinstance(model, (list, tuple)):
        if len(model) != 2 or not hasattr(model[0], "generate"):
            raise RevisitError("A loaded model is given as the pair (model, processor), as revisit.load returns it.")
        return model[0], model[1]
    if hasattr(model, "generate"):
        return model, processor_of(model, "ask")
    raise RevisitError(
        f"model must be a name, a path or the pair (model, processor) of revisit.load, not a {type(model).__name__}."
    )


@lru_cache(maxsize=1)
def _load(name: str) -> tuple[Any, Any]:
    from revisit.models.loading import load

    return load(name)


def _notes(name: str, model: Any, processor: Any, pictures: Sequence[Image]) -> list[str]:
    """For the embedded model: that it cannot know a picture which is not like its scenes."""
    from revisit.embedded.familiar import KNOWS, advice
    from revisit.models.config import is_embedded

    if not is_embedded(name):
        return []
    found = [said for image in pictures if (said := advice(model, processor, image, "This picture", "")) is not None]
    return [f"{KNOWS} {found[0]}"] if found else []
