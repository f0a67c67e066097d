"""Methods that penalize attention, follow beams and step back: the second tutorial, and each part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import families
import revisit
from revisit import Greedy, Method
from revisit.decoding.loop import Loop
from revisit.decoding.method import METHODS, Step
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt

TUTORIAL = f"{Path(__file__).parents[2] / 'docs' / 'tutorials' / 'attention_penalty.py'}:AttentionPenalty"
NEW = 6


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "registered", {})


def inputs(family: str, count: int = 2) -> dict[str, Tensor]:
    texts, images = ["what is it", "and what is this one"], [[families.image(1)], [families.image(2)]]
    return dict(families.inputs(family, texts[:count], images[:count]))


class OwnLoop(Method):
    """Greedy decoding by its own loop, which steps back by `back` tokens and runs them again."""

    back: int = 0
    candidates: int = 0

    name = "own-loop"

    def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> Tensor:
        ids = prompt.ids
        while True:
            logits = loop.forward(ids)
            if self.candidates:  # look ahead and forget
                for token in logits.topk(self.candidates).indices.T:
                    loop.forward(torch.cat([ids, token[:, None]], dim=1))
                    loop.crop(ids.shape[1])
            if self.back and ids.shape[1] - self.back >= prompt.ids.shape[1]:
                loop.crop(ids.shape[1] - self.back)
                again = loop.forward(ids)
                torch.testing.assert_close(again, logits, atol=1e-4, rtol=1e-4)
            ids = torch.cat([ids, loop.scores(ids, logits).argmax(-1, keepdim=True)], dim=1)
            if bool(loop.ended(ids).all()):
                return ids


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl", "smolvlm"])
@pytest.mark.parametrize("settings", [{}, {"back": 2}, {"candidates": 2}], ids=str)
def test_an_own_loop_gives_the_tokens_of_transformers_loop(family: str, settings: dict[str, int]) -> None:
    model, _ = families.build(family)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": families.VOCAB + 1, "min_new_tokens": 2}
    plain = revisit.generate(model, **inputs(family), method="greedy", **options)
    trace = revisit.Trace(record=True)
    own = revisit.generate(model, **inputs(family), method=OwnLoop(**settings), trace=trace, **options)
    assert own.tolist() == plain.tolist()
    if "back" not in settings:  # there, steps that were taken back are run together and noted once
        assert [record.token for record in trace.rows[1].records] == plain[1, -NEW:].tolist()


def test_an_own_loop_works_without_a_cache_and_with_an_output_object() -> None:
    model, _ = families.build("llava")
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": families.VOCAB + 1}
    plain = revisit.generate(model, **inputs("llava"), method="greedy", **options)
    own = revisit.generate(
        model, **inputs("llava"), method=OwnLoop(back=2), use_cache=False, return_dict_in_generate=True, **options
    )
    assert own.sequences.tolist() == plain.tolist()


def test_an_own_loop_is_streamed_when_it_ends() -> None:
    model, _ = families.build("llava")
    streamed: list[int] = []
    streamer = SimpleNamespace(put=lambda ids: streamed.extend(ids.flatten().tolist()), end=lambda: streamed.append(-1))
    out = revisit.generate(
        model, **inputs("llava", 1), method=OwnLoop(), streamer=streamer, max_new_tokens=NEW, do_sample=False
    )
    assert streamed == [*out[0].tolist(), -1]


def test_steps_back_that_are_not_possible_raise() -> None:
    model, _ = families.build("llava")

    class Further(OwnLoop):
        name = "further"

        def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> Tensor:
            loop.forward(prompt.ids)
            loop.crop(3)
            return prompt.ids

    class Again(OwnLoop):
        name = "again"

        def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> Tensor:
            loop.forward(prompt.ids)
            return loop.forward(prompt.ids)

    with pytest.raises(RevisitError, match="the length must be between"):
        revisit.generate(model, **inputs("llava"), method=Further(), max_new_tokens=2)
    with pytest.raises(RevisitError, match="at least one new token"):
        revisit.generate(model, **inputs("llava"), method=Again(), max_new_tokens=2)
    with pytest.raises(RevisitError, match=r"does not support.*use the default cache"):
        revisit.generate(
            model, **inputs("llava"), method=OwnLoop(back=1), max_new_tokens=3, cache_implementation="static"
        )
    with pytest.raises(RevisitError, match="own-loop has its own decoding loop; use it alone"):
        revisit.generate(model, **inputs("llava"), method=revisit.Chain([OwnLoop(), "vcd"]), max_new_tokens=2)


class Follow(Method):
    """Tracks every beam's tokens with the hook."""

    name = "follow"

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        seen: dict[str, Tensor] = {"ids": prompt.ids}

        def reorder(rows: Tensor) -> None:
            seen["ids"] = seen["ids"][rows]

        passes.on_reorder(reorder)

        def step(input_ids: Tensor, logits: Tensor) -> Tensor:
            assert input_ids[:, : seen["ids"].shape[1]].tolist() == seen["ids"].tolist()
            seen["ids"] = input_ids
            return logits

        return step


@pytest.mark.parametrize(
    "wrap", [lambda method: method, lambda method: revisit.Chain([method, "vcd"])], ids=["", "vcd"]
)
def test_the_hook_for_reordered_beams(wrap: Callable[[Method], Method]) -> None:
    model, _ = families.build("llava")
    options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False}
    plain = revisit.generate(model, **inputs("llava"), method=wrap(Greedy()), **options)
    assert revisit.generate(model, **inputs("llava"), method=wrap(Follow()), **options).tolist() == plain.tolist()
    with pytest.raises(RevisitError, match="leave out use_cache=False"):
        revisit.generate(model, **inputs("llava"), method=Follow(), use_cache=False, **options)


def test_the_tutorial_steps_back_from_too_much_attention() -> None:
    model, _ = families.build("llava")
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": families.VOCAB + 1}
    plain = revisit.generate(model, **inputs("llava"), method="greedy", **options)
    never = revisit.generate(model, **inputs("llava"), method=f"{TUTORIAL}:limit=1", **options)
    always = revisit.generate(model, **inputs("llava"), method=f"{TUTORIAL}:limit=0", **options)
    assert never.tolist() == plain.tolist()
    assert always.shape == plain.shape
    assert always.tolist() != plain.tolist()


def test_the_tutorial_penalizes_beams_for_attention() -> None:
    model, _ = families.build("llava")
    options = {"max_new_tokens": NEW, "num_beams": 3, "do_sample": False, "return_dict_in_generate": True}
    options |= {"output_scores": True}
    plain = revisit.generate(model, **inputs("llava"), method="greedy", **options)
    free = revisit.generate(model, **inputs("llava"), method=f"{TUTORIAL}:weight=0", **options)
    paid = revisit.generate(model, **inputs("llava"), method=f"{TUTORIAL}:weight=1", **options)
    assert free.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(free.sequences_scores, plain.sequences_scores)
    assert (paid.sequences_scores < plain.sequences_scores).all()


def test_a_loop_that_returns_nothing_raises_one_sentence() -> None:
    class Forgetful(Method):
        name = "forgetful"

        def decode(self, prompt: Prompt, passes: Passes, loop: Loop) -> Tensor:
            return None  # type: ignore[return-value]

    model, _ = families.build("llava")
    with pytest.raises(RevisitError, match=r"'forgetful' must return token ids from its decode.* not NoneType"):
        revisit.generate(model, **inputs("llava", 1), method=Forgetful(), max_new_tokens=NEW)
