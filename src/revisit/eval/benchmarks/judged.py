"""Benchmarks whose answers are graded by a language model behind an OpenAI-compatible API; every reply is stored."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from revisit import settings
from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Benchmark, Item, Scores, ratio
from revisit.eval.benchmarks.io import packaged
from revisit.io.records import Fields

TIMEOUT = 60.0  # seconds
ATTEMPTS = 5


class Judged(Benchmark):
    """A benchmark that is scored from a judge's replies; its prompt is a file, and subclasses parse its replies.

    Args:
        judge: "none" (no judge), "model" (the model at `judge_url`), or "reviews" (the answer file has the replies of a judge).
        judge_url: The base URL of an OpenAI-compatible API, such as https://api.openai.com/v1; its key is in OPENAI_API_KEY.
        judge_model: The judge's name there.
        judge_cache: An SQLite file that stores its replies as they arrive.
    """

    judge: Literal["none", "model", "reviews"] = "none"
    judge_url: str = Field("", exclude=True)
    judge_model: str = "gpt-4-0314"
    judge_cache: Path | None = Field(None, exclude=True)

    system: ClassVar[str | None] = None  # the judge's system message
    temperature: ClassVar[float] = 0.2  # of the judge

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.judge == "model" and not self.judge_url.startswith(("http://", "https://")):
            raise RevisitError("A model judge needs judge_url, the base URL of an OpenAI-compatible API.")
        return self

    @property
    def version(self) -> str:
        return f"{self.name}-{self.judge_model if self.judge == 'model' else self.judge}-1"

    def judge_prompt(self, item: Item, answer: str) -> str:
        """Return the judge's prompt about an answer: `data/NAME_judge.txt`, filled in."""
        return packaged(f"{self.name}_judge.txt").removesuffix("\n").format(item=item, answer=answer)

    def score_replies(self, items: list[Item], replies: Mapping[str, str]) -> Scores:
        """Compute the scores from the judge's replies."""
        raise NotImplementedError  # every judged benchmark defines it

    def score_unjudged(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        """Compute the scores without a judge: by default only the mean length of the answers."""
        words = {item.id: (float(len(answers[item.id].split())), 1.0) for item in items}
        note = "Not judged: set a judge to get a score; words is the mean length of the answers."
        return Scores({"words": ratio(words.values())}, {"words": words}, {"answers": float(len(items))}, (note,))

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        if self.judge == "none":
            return self.score_unjudged(items, answers)
        if self.judge == "reviews":
            return self.score_replies(items, answers)
        replies = self.replies(self.judge_prompt(item, answers[item.id]) for item in items)
        return self.score_replies(items, {item.id: reply for item, reply in zip(items, replies, strict=True)})

    def replies(self, prompts: Iterable[str]) -> list[str]:
        """Return the judge's reply to each prompt; a request with a cached reply is not sent again."""
        need("openai")
        import openai

        key = settings.secret("OPENAI_API_KEY") or "none"
        client = openai.OpenAI(base_url=self.judge_url, api_key=key, timeout=TIMEOUT, max_retries=ATTEMPTS - 1)
        system = [{"role": "system", "content": self.system}] if self.system else []
        replies = []
        with client, closing(_open_cache(self.judge_cache)) as cache:
            for prompt in prompts:
                messages = [*system, {"role": "user", "content": prompt}]
                request = {"model": self.judge_model, "messages": messages, "temperature": self.temperature}
                digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
                row = cache.execute("SELECT reply FROM replies WHERE key = ?", (digest,)).fetchone()
                if row is None:
                    row = (self._send(client, request),)
                    cache.execute("INSERT INTO replies VALUES (?, ?)", (digest, *row))
                replies.append(str(row[0]))
        return replies

    def _send(self, client: Any, request: Fields) -> str:
        """Return the server's reply; the client retries with growing pauses while the server is busy."""
        import openai

        try:
            content = client.chat.completions.create(**request).choices[0].message.content
        except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise RevisitError(
                f"The judge at {self.judge_url} did not answer ({error}); run the same command again to resume."
            ) from error
        if not isinstance(content, str):
            raise RevisitError(f"The judge at {self.judge_url} sent a reply without text.")
        return content


def _open_cache(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path or ":memory:", isolation_level=None)
        connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
    except (sqlite3.Error, OSError) as error:
        raise RevisitError(f"{path} cannot be used as the judge's cache: {error}; use another file.") from error
    return connection
