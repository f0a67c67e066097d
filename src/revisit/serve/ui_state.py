"""What the page's server keeps: models (one loaded at a time), and the images and answers of the last minutes."""

from __future__ import annotations

import functools
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from revisit.errors import RevisitError, unknown
from revisit.serve.errors import ApiError, shorten
from revisit.serve.limits import Limits
from revisit.serve.requests import make_method, parse
from revisit.serve.schema import Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.explain.record import Decode

KEPT = 8  # images and answers
T = TypeVar("T")


class RecentItems(Generic[T]):
    """The last few items, fewer where their images are large, each under a name that cannot be guessed."""

    def __init__(self, images: Callable[[T], Sequence[Image]], pixels: int) -> None:
        self.images, self.pixels, self.items = images, pixels, OrderedDict[str, T]()
        self.lock = threading.Lock()

    def put(self, item: T) -> str:
        name = uuid.uuid4().hex
        with self.lock:
            self.items[name] = item
            while len(self.items) > KEPT or (len(self.items) > 1 and self._held() > self.pixels):
                self.items.popitem(last=False)
        return name

    def _held(self) -> int:
        return sum(image.width * image.height for item in self.items.values() for image in self.images(item))

    def get(self, name: str) -> T | None:
        with self.lock:
            return self.items.get(name)


@dataclass(frozen=True)
class Picture:
    """An image to ask about, with the objects that are in it where that is known."""

    image: Image
    objects: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CheckedQuestion:
    """A question whose image is here and whose methods are made."""

    image: Image
    objects: tuple[str, ...] | None
    prompt: str
    model: str
    methods: tuple[Method, ...]
    max_new_tokens: int


@dataclass
class UiState:
    """What all questions share."""

    models: tuple[str, ...]
    loader: Callable[[str], tuple[Any, Any]]
    limits: Limits = field(default_factory=Limits)
    images: RecentItems[Picture] = field(init=False)
    runs: RecentItems[Decode] = field(init=False)
    turn: threading.Lock = field(default_factory=threading.Lock)  # one question at a time
    waiting: int = 0  # questions that wait or are being answered
    loaded: tuple[str, Any, Any] | None = None
    _count: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.images = RecentItems(lambda picture: [picture.image], self.limits.image_pixels)
        self.runs = RecentItems(lambda decode: decode.images, self.limits.image_pixels)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """One more question waits or is answered for as long as this lasts."""
        with self._count:
            self.waiting += 1
        try:
            yield
        finally:
            with self._count:
                self.waiting -= 1

    def model(self, name: str) -> tuple[Any, Any]:
        """(model, processor); called with `turn` held."""
        if self.loaded is None or self.loaded[0] != name:
            self.loaded = None  # let go of the old one first: two may not fit
            self.loaded = (name, *self.loader(name))
        return self.loaded[1], self.loaded[2]

    def read(self, body: bytes) -> CheckedQuestion:
        """A request as a question; `ApiError` says what is wrong with it."""
        asked = parse(Question, body, self.limits)
        picture = self.images.get(asked.image)
        if picture is None:
            raise ApiError(400, "The image is no longer in memory; choose it again.")
        if not asked.prompt.strip():
            raise ApiError(400, "The question is empty; say what to ask.")
        if len(asked.prompt) > self.limits.characters:
            raise ApiError(
                400,
                f"The question has {len(asked.prompt):,} characters; at most {self.limits.characters:,} are allowed.",
            )
        if asked.max_new_tokens > self.limits.new_tokens:
            raise ApiError(400, f"An answer may have 1 to {self.limits.new_tokens} tokens, not {asked.max_new_tokens}.")
        if asked.model not in self.models:
            raise ApiError(400, str(unknown("model", shorten(asked.model), self.models)))
        about = described(asked.model)
        made = tuple(make_method(m.name, m.settings or {}, self.limits, about) for m in asked.methods)
        return CheckedQuestion(picture.image, picture.objects, asked.prompt, asked.model, made, asked.max_new_tokens)


@functools.cache
def described(model: str) -> Any:
    """What recommendations look at; the model's family alone where its files are not there."""
    from revisit.models.loading import describe_model

    try:
        return describe_model(model)
    except RevisitError:
        return model
