"""Benchmarks whose answers a language model judges: what they share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import model_validator
from typing_extensions import Self

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark, Item, Scores, check_answers, ratio
from revisit.eval.benchmarks.judge import Judge


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
        if self.judge == "model" and not self.judge_url:
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
