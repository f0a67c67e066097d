"""Benchmarks whose answers a language model judges, behind any OpenAI-compatible endpoint; every reply is kept."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from typing_extensions import Self

from revisit import settings
from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Benchmark, Item, Scores, check_answers, ratio

TIMEOUT = 60.0  # seconds
ATTEMPTS = 5


class Judge:
    """A model behind `url`, the base of an API such as https://api.openai.com/v1; its key is in the variable OPENAI_API_KEY.

    `cache` is an SQLite file with every reply, written as replies arrive.
    """

    def __init__(self, url: str, model: str, cache: Path | None = None, temperature: float = 0.0) -> None:
        need("openai")
        self.url, self.model, self.temperature = url, model, temperature
        try:
            if cache is not None:
                cache.parent.mkdir(parents=True, exist_ok=True)
            self._replies = sqlite3.connect(cache or ":memory:", isolation_level=None)
            self._replies.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise RevisitError(f"{cache} cannot be used as the judge's cache: {error}; use another file.") from error

    def ask(self, prompt: str, system: str | None = None) -> str:
        """Return the reply to a prompt, from the cache if the same model was asked before at the same temperature."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        request = {"model": self.model, "messages": messages, "temperature": self.temperature}
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        found = self._replies.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        if found is None:
            found = (self._post(request),)
            self._replies.execute("INSERT INTO replies VALUES (?, ?)", (key, *found))
        return str(found[0])

    def close(self) -> None:
        """Close the cache."""
        self._replies.close()

    def _post(self, request: dict[str, Any]) -> str:
        """Return the server's reply; the client retries with growing pauses while the server is busy."""
        import openai

        key = settings.secret("OPENAI_API_KEY") or "none"
        try:
            with openai.OpenAI(base_url=self.url, api_key=key, timeout=TIMEOUT, max_retries=ATTEMPTS - 1) as client:
                content = client.chat.completions.create(**request).choices[0].message.content
        except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise RevisitError(
                f"The judge at {self.url} did not answer ({error}); run the same command again to resume."
            ) from error
        if not isinstance(content, str):
            raise RevisitError(f"The judge at {self.url} sent a reply without text.")
        return content


class Judged(Benchmark):
    """A benchmark that is scored from the replies of a judge; a subclass defines the judge's prompt and how its replies are read.

    Args:
        judge: "none" (no judge), "model" (asked at `judge_url`), or "reviews", which takes the answers as replies that a judge has
            given before.
        judge_url: The base address of an OpenAI-compatible API.
        judge_model: The judge's name there.
        judge_cache: An SQLite file that keeps its replies.
    """

    judge: Literal["none", "model", "reviews"] = "none"
    judge_url: str = ""
    judge_model: str = "gpt-4-0314"
    judge_cache: Path | None = None

    system: ClassVar[str | None] = None  # the judge's system message
    temperature: ClassVar[float] = 0.2  # of the judge

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.judge == "model" and not self.judge_url.startswith(("http://", "https://")):
            raise RevisitError("A model judge needs judge_url, the base address of an OpenAI-compatible API.")
        return self

    @property
    def version(self) -> str:
        return f"{self.name}-{self.judge_model if self.judge == 'model' else self.judge}-1"

    def ask(self, item: Item, answer: str) -> str:
        """Return the judge's prompt about an answer."""
        raise NotImplementedError  # every judged benchmark defines it

    def score_replies(self, items: list[Item], replies: Mapping[str, str]) -> Scores:
        """Compute the scores from the judge's replies."""
        raise NotImplementedError  # every judged benchmark defines it

    def score_unjudged(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        """Compute the scores without a judge: by default only the mean length of the answers."""
        words = {item.id: (float(len(answers[item.id].split())), 1.0) for item in items}
        note = "Not judged: set a judge to get a score; words is the mean length of the answers."
        return Scores({"words": ratio(words.values())}, {"words": words}, {"answers": float(len(items))}, (note,))

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        check_answers(items, answers)
        if self.judge == "none":
            return self.score_unjudged(items, answers)
        if self.judge == "reviews":
            return self.score_replies(items, answers)
        with closing(Judge(self.judge_url, self.judge_model, self.judge_cache, self.temperature)) as judge:
            replies = {item.id: judge.ask(self.ask(item, answers[item.id]), system=self.system) for item in items}
        return self.score_replies(items, replies)
