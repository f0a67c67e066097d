"""`revisit doctor --engine`: check what an OpenAI-compatible server does with images and options.

The commonest fault of such servers is silent: the image never reaches the model. The checks send two images of this package, an empty one
and none, and compare the answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from PIL import Image as pil
from PIL.Image import Image

from revisit.cli.checkup import Check, Status
from revisit.embedded.samples import SAMPLES
from revisit.errors import RevisitError, printable, short
from revisit.models import DESCRIBE
from revisit.pages.document import data_uri

Json = dict[str, Any]
NEW = 24  # tokens of an answer
SECONDS = 600  # for an answer
MAX_BYTES = 32 << 20  # of a response
NEAR = 1e-4  # log-probabilities closer than this are equal
WORDS = ("quartz", "xylophone")  # that no model writes about an image by itself
SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": WORDS}},
    "required": ["word"],
    "additionalProperties": False,
}
# How a request names ReVisiT's settings: `revisit serve`, and vLLM with the plug-in.
PLACES: dict[str, Callable[[int], dict[str, Any]]] = {
    "revisit serve": lambda alpha: {"decoding": {"method": "revisit", "settings": {"alpha": alpha}}},
    "the vLLM plug-in": lambda alpha: {"vllm_xargs": {"revisit": f"revisit:alpha={alpha}"}},
}


def checks(url: str, model: str | None, key: str | None, reference: str | None) -> Iterator[Check]:
    """Yield the outcome of every check of a server; `reference` names a local model to compare its text with."""
    yield from Examination(Engine(url, model, key), reference).checks()


class Rejected(Exception):
    """A request that the server did not answer with status 200."""


class Engine:
    """A server, and the model on it."""

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RevisitError(
                f"--engine must be a server's address such as http://127.0.0.1:8000/v1, not {short(url)}."
            )
        self.url = parts._replace(path=parts.path.rstrip("/") or "/v1", query="", fragment="").geturl()
        self.headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            listed = [str(entry["id"]) for entry in self.call("models")["data"]]
        except (Rejected, KeyError, TypeError) as error:
            raise RevisitError(
                f"{self.url}/models did not list models ({short(str(error))}); check --engine."
            ) from None
        if model is None and len(listed) != 1:
            raise RevisitError(f"The server has the models {', '.join(map(short, listed))}; choose one with --model.")
        self.model = listed[0] if model is None else model

    def call(self, path: str, body: Json | None = None) -> Any:
        """Return the JSON that the server answers; raise Rejected for an error status, RevisitError if it cannot be reached."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(f"{self.url}/{path}", data, self.headers), timeout=SECONDS) as reply:
                return json.loads(reply.read(MAX_BYTES))
        except HTTPError as error:
            raise Rejected(f"status {error.code}: {_sentence(error.read(MAX_BYTES))}") from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise RevisitError(f"{self.url} cannot be reached ({short(str(reason))}); check --engine.") from None
        except ValueError:
            raise Rejected("an answer that is not JSON") from None

    def ask(self, image: Image | None, **options: Any) -> Answer:
        """Ask for a description of an image."""
        content: list[Json] = [{"type": "text", "text": DESCRIBE}]
        if image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": data_uri(image)}})
        fields = {"max_tokens": NEW, "temperature": 0, **options}
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        return Answer(self.call("chat/completions", body))


class Answer:
    """What the server answered."""

    def __init__(self, body: Any) -> None:
        try:
            message = body["choices"][0]["message"]
            self.text = str(message.get("content") or message.get("reasoning_content") or "").strip()
            self.tokens = (body.get("usage") or {}).get("prompt_tokens")
            self.body = body
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Rejected("an answer that is no chat completion") from None

    @property
    def first(self) -> dict[str, float]:
        """The log-probabilities of the first token's candidates, if there are any."""
        entries = (self.body["choices"][0].get("logprobs") or {}).get("content") or [{}]
        return {entry["token"]: entry["logprob"] for entry in entries[0].get("top_logprobs") or ()}

    def differs(self, other: Answer) -> bool:
        """Whether the text or the first token's log-probabilities are others."""
        a, b = self.first, other.first
        return self.text != other.text or a.keys() != b.keys() or any(abs(a[name] - b[name]) > NEAR for name in a)


class Examination:
    """The checks of one server."""

    def __init__(self, engine: Engine, reference: str | None) -> None:
        self.engine, self.reference = engine, reference
        self.samples = list(SAMPLES.values())[:2]
        self.images = [sample.image() for sample in self.samples]

    def checks(self) -> Iterator[Check]:
        """Yield the outcome of every check."""
        yield from self.image()
        for name, check in (
            ("log-probabilities", self.logprobs),
            ("seeds", self.seeds),
            ("JSON schemas", self.schema),
            ("ReVisiT", self.method),
            ("same text as transformers", self.text),
        ):
            try:
                outcome = check()
            except Rejected as error:
                outcome = ("NOTE", f"rejected, {error}")
            if outcome is not None:
                yield Check(name, *outcome)

    @cached_property
    def options(self) -> Json:
        """Request log-probabilities, which show small differences, where the server has them."""
        asked = {"logprobs": True, "top_logprobs": 5}
        try:
            return asked if self.engine.ask(None, **asked).first else {}
        except Rejected:
            return {}

    def ask(self, image: Image | None) -> Answer:
        return self.engine.ask(image, **self.options)

    def image(self) -> Iterator[Check]:
        """Yield whether the model sees images, and what they cost."""
        self.plain = self.ask(None)
        try:
            first, again, other = (self.ask(self.images[n]) for n in (0, 0, 1))
            empty = self.ask(pil.new("RGB", self.images[0].size, "white"))
            large = self.ask(self.images[0].resize([2 * side for side in self.images[0].size]))
        except Rejected as error:
            yield Check("image", "FAIL", f"rejected, {error}")
            return
        self.first = first
        if first.differs(again):
            yield Check(
                "image", "NOTE", "equal requests get different answers at temperature 0, so this cannot be told"
            )
        elif not first.differs(other):
            whom = "nor an empty image" if not first.differs(empty) else "though an empty image does"
            yield Check("image", "FAIL", f"two different images change nothing in the answer, {whom}: it was not seen")
        else:
            names = [noun for noun in self.samples[0].nouns if noun in first.text.lower()]
            named = f"; the answer names {', '.join(names)}" if names else ""
            blank = "" if first.differs(empty) else "; an empty image gets the answer of the first"
            yield Check("image", "NOTE" if blank else "PASS", f"two images get different answers{named}{blank}")
        costs = [answer.tokens and self.plain.tokens and answer.tokens - self.plain.tokens for answer in (first, large)]
        sizes = ["×".join(map(str, image)) for image in (self.images[0].size, [2 * s for s in self.images[0].size])]
        if not all(costs):
            yield Check("image tokens", "NOTE", "the token counts do not tell (the server may not count images)")
        else:
            counts = ", ".join(f"{cost} for {size}" for cost, size in zip(costs, sizes, strict=True))
            yield Check("image tokens", "PASS", counts)
        same = "the same answer" if large.text == first.text else "another answer"
        yield Check("resized image", "PASS", f"{same} at twice the size")

    def logprobs(self) -> tuple[Status, str]:
        if not self.options:
            return "NOTE", "not returned"
        total = sum(math.exp(value) for value in self.plain.first.values())
        return ("PASS", "returned") if total < 1.001 else ("NOTE", f"their probabilities add up to {total:.2f}")

    def seeds(self) -> tuple[Status, str]:
        texts = [self.engine.ask(None, temperature=1.5, seed=seed).text for seed in (1, 1, 2, 3)]
        if texts[0] != texts[1]:
            return "NOTE", "ignored: one seed gave two answers"
        return ("PASS", "one seed, one answer") if len({*texts}) > 1 else ("NOTE", "all seeds give one answer")

    def schema(self) -> tuple[Status, str]:
        form = {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA, "strict": True}}
        text = self.engine.ask(None, response_format=form, max_tokens=4 * NEW).text
        try:
            followed = json.loads(text)["word"] in WORDS
        except (ValueError, KeyError, TypeError):
            followed = False
        return ("PASS", "followed") if followed else ("NOTE", f"not followed: {short(text)}")

    def method(self) -> tuple[Status, str]:
        """Find where settings are read: a wrong one is rejected, and alpha=1 leaves nothing to draw from."""
        for name, place in PLACES.items():
            try:
                self.engine.ask(self.images[0], **place(7))
            except Rejected as error:
                if "alpha" in str(error):
                    sampled = [
                        self.engine.ask(self.images[0], temperature=1.5, seed=n, **place(1)).text for n in (1, 2, 3)
                    ]
                    if len({*sampled}) > 1:
                        return "FAIL", f"{name} reads its settings, but they do not reach the decoding"
                    return "PASS", f"{name} is active, and its settings reach the decoding"
        return "NOTE", "not active: the server does not read its settings"

    def text(self) -> tuple[Status, str] | None:
        """Compare the answer with that of transformers, if a local model is given."""
        if self.reference is None or not hasattr(self, "first"):
            return None
        from revisit.explain.ask import ask

        wanted = ask(self.reference, self.images[0], DESCRIBE, "greedy", max_new_tokens=NEW).text
        try:
            found = self.engine.ask(self.images[0], decoding={"method": "greedy"}).text  # `revisit serve` refines
        except Rejected:
            found = self.first.text
        if found == wanted:
            return "PASS", "equal"
        shared = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), 0)
        begins = f"{short(found)} instead of {short(wanted)}"
        return ("NOTE" if 2 * shared > len(wanted) else "FAIL"), f"{begins}, equal for {shared} characters"


def _sentence(body: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the beginning of another body."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        text = str(found["error"]["message"] if "error" in found else found["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return printable(text[:200])
