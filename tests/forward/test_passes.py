"""Who sees which forward pass: functions of a method get the rows and columns of the main pass, whatever runs next to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import families
import revisit
from revisit import ICD, Chain, Method, StepResult, Trace
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt

NEW = 4


def inputs() -> dict[str, Any]:
    return dict(families.inputs("llava", ["what is it", "and this"], [[families.image(1)], [families.image(2)]]))


def decode(method: Any, **options: Any) -> Any:
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": families.VOCAB + 1,
        "pad_token_id": 0,
        **options,
    }
    return revisit.generate(families.build("llava")[0], **inputs(), method=method, **options)


class Probe(Method):
    """Collects what a method is given, and changes nothing."""

    name = "probe"

    def begin(self, prompt: Prompt, passes: Passes) -> Any:
        seen.clear()
        with pytest.raises(dataclasses.FrozenInstanceError):
            prompt.ids = prompt.ids  # type: ignore[misc]

        def on_attention(call: Call) -> None:
            image = call.columns(prompt.vision)  # (rows, columns)
            seen.append((call.last_attention() * image[:, None]).sum(-1))  # (rows, heads)

        passes.on_attention(on_attention, layers=[1])
        passes.on_layer(2, lambda states: seen.append(states[:, -1].clone()))
        return lambda input_ids, logits: logits


seen: list[Tensor] = []


@pytest.mark.parametrize("mode", ["stacked", "sequential"])
@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_functions_see_the_main_pass_next_to_a_longer_contrasted_prompt(mode: Any, order: int) -> None:
    """ICD's sentence makes its prompt longer, so the main rows are padded in the cache that both share."""
    decode(Probe())
    alone = list(seen)
    decode(Chain([ICD(alpha=0.0, beta=0.0, mode=mode), Probe()][::order]), processor=families.build("llava")[1])
    assert len(seen) == len(alone) == 2 * NEW
    for mine, want in zip(seen, alone, strict=True):
        torch.testing.assert_close(mine, want, atol=1e-4, rtol=1e-3)


class Votes(Method):
    """Adds what the vision tokens vote for, as a first method from the guide might."""

    weight: float = 1.0

    name = "votes"

    def begin(self, prompt: Prompt, passes: Passes) -> Any:
        capture = passes.capture("last")

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            head, (states, _) = capture.head(passes.raw), capture.padded()
            votes = head.logits(states, torch.arange(logits.shape[-1])).softmax(-1)  # NaN in padding
            votes = votes.nan_to_num(0.0).amax(1)
            return StepResult(logits + self.weight * votes, acted=prompt.has_image)

        return step


def test_a_method_may_read_captured_states_at_every_step() -> None:
    trace = Trace(record=True)
    assert torch.equal(decode(Votes(weight=0.0)), decode("greedy"))
    assert decode(Votes(weight=100.0), trace=trace).tolist() != decode("greedy").tolist()
    assert [row.applied for row in trace.rows] == [NEW, NEW]


class Erased(Method):
    """Sets a hidden state to zero in the rows of the call."""

    layer: int = 0

    name = "erased"

    def begin(self, prompt: Prompt, passes: Passes) -> Any:
        passes.on_layer(self.layer, torch.zeros_like)

        def step(input_ids: Tensor, logits: Tensor) -> Tensor:
            seen.append(logits.clone())
            return logits

        return step


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_function_replaces_any_hidden_state(layer: int) -> None:
    """Of zeros, an LM head without a bias makes zeros; from an earlier layer on, both rows are equal."""
    seen.clear()
    decode(Erased(layer=layer), max_new_tokens=1)
    expected = torch.zeros_like(seen[0]) if layer == 4 else seen[0][[0, 0]]
    torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=1e-4)


class Shifted(Method):
    """Adds a constant to the scores of every other row."""

    comparable: bool = False

    name = "shifted"

    def begin(self, prompt: Prompt, passes: Passes) -> Any:
        constant = 40.0 * (torch.arange(len(prompt.ids)) % 2)[:, None]
        return lambda input_ids, logits: StepResult(logits + constant, comparable=self.comparable)


def test_beams_are_compared_by_normalized_scores_unless_a_method_says_that_they_are_comparable() -> None:
    plain = decode("greedy", num_beams=3)
    assert torch.equal(decode(Shifted(), num_beams=3), plain)
    assert not torch.equal(decode(Shifted(comparable=True), num_beams=3), plain)


def test_a_method_acts_where_it_says_so_although_the_logits_stay() -> None:
    for method, applied in (("middle_layers", NEW), (Chain(["middle_layers", "vaf"]), NEW), ("greedy", 0)):
        trace = Trace()
        decode(method, trace=trace)
        assert [row.applied for row in trace.rows] == [applied] * 2


class Operations(TorchDispatchMode):
    """Count the operations inside the context whose first argument has a column per token."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].shape[-1:] == (families.VOCAB,):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_counters_over_the_vocabulary_are_computed_for_a_trace_only() -> None:
    with Operations() as without:
        decode("plausible_only")
    with Operations() as with_trace:
        decode("plausible_only", trace=Trace())
    assert without.counts["argmax"] == NEW  # transformers' own choice
    assert with_trace.counts["argmax"] == 3 * NEW


class Nested(Method):
    """Decodes a text of its own before it begins."""

    name = "nested"

    def begin(self, prompt: Prompt, passes: Passes) -> Any:
        ids = inputs()
        revisit.generate(prompt.model, **ids, method="greedy", max_new_tokens=2)
        prompt.model.generate(**ids, custom_generate=revisit.Greedy(), max_new_tokens=2)
        return lambda input_ids, logits: logits


def test_a_call_within_a_call_has_its_own_arguments() -> None:
    class Streamer:
        tokens = 0

        def put(self, ids: Tensor) -> None:
            self.tokens += 1

        def end(self) -> None:
            pass

    one, streamer = families.inputs("llava", ["what"], [[families.image(1)]]), Streamer()
    options = {"max_new_tokens": NEW, "eos_token_id": families.VOCAB + 1}
    revisit.generate(families.build("llava")[0], **one, method=Nested(), streamer=streamer, **options)
    assert streamer.tokens == 1 + NEW  # the prompt and the tokens
