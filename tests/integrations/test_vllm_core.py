"""The parts of the vLLM plug-in that need no vLLM: requests, states, the sharded head, and the step that both runners share."""

from __future__ import annotations

import gc
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.integrations import vllm
from revisit.integrations.vllm.head import Rows, ShardedHead
from revisit.integrations.vllm.request import LAYERS_SWITCH, admit, check, collectable, parse
from revisit.integrations.vllm.states import RequestStates, held
from revisit.integrations.vllm.tap import Layout, Row, Tap
from revisit.methods.revisit import ReVisiT
from revisit.step.reference import refine, scatter

IMAGE, WIDTH, VOCABULARY, DEPTH = 9, 6, 40, 3


class Params:
    def __init__(self, extra_args: Any = None) -> None:
        self.extra_args, self.skip_reading_prefix_cache = extra_args, None


# -- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"revisit": None}, {"revisit": False}, {"revisit": 0}])
def test_requests_that_ask_for_nothing_are_left_alone(extra: Any) -> None:
    params = Params(extra)
    assert parse(extra) is None
    admit(params)
    assert params.skip_reading_prefix_cache is None


def test_settings_come_as_a_mapping_a_json_string_or_one() -> None:
    assert parse({"revisit": {"alpha": 0.1, "select": "max"}}) == ReVisiT(alpha=0.1, select="max")
    assert parse({"revisit": json.dumps({"alpha": 0.1})}) == ReVisiT(alpha=0.1)
    assert parse({"revisit": 1}) == parse({"revisit": True}) == parse({"revisit": "1"}) == ReVisiT()
    assert parse({"revisit": {}}) == ReVisiT()


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("{alpha", "not JSON"),
        ([1, 2], "no set of settings"),
        (7, "no set of settings"),
        ("7", "no set of settings"),
        ({"alhpa": 1}, "Did you mean 'alpha'"),
        ({"alpha": 3}, "at most 1"),
        ({"alpha": "x"}, "must be a number"),
        ({"layers": "lats"}, "Did you mean 'last'"),
        ({"layers": "all"}, "REVISIT_VLLM_LAYERS=all"),
    ],
)
def test_bad_settings_are_one_sentence(value: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):  # vLLM turns a ValueError into a 400
        admit(Params({"revisit": value}))


def test_an_opted_in_request_reads_no_cached_prefix() -> None:
    params = Params({"revisit": {}})
    admit(params)
    assert params.skip_reading_prefix_cache is True


def test_the_server_says_which_layers_it_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collectable() == "last"
    monkeypatch.setenv(LAYERS_SWITCH, "1, 3")
    assert collectable() == (1, 3)
    check(ReVisiT(layers=(3,)), collectable())
    check(ReVisiT(), collectable())
    with pytest.raises(RevisitError, match="'1,3' only, not '2'"):
        check(ReVisiT(layers=(2,)), collectable())
    monkeypatch.setenv(LAYERS_SWITCH, "some")
    with pytest.raises(RevisitError, match="comma-separated"):
        collectable()


def test_installing_changes_nothing_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm.SWITCH, raising=False)
    monkeypatch.setattr(vllm, "register", lambda: pytest.fail("registered without being asked"))
    vllm.plugin()
    monkeypatch.setenv(vllm.SWITCH, "0")
    vllm.plugin()


# -- states -------------------------------------------------------------------------------------------------------


@st.composite
def prompts(draw: Any) -> tuple[list[int], list[int]]:
    """A prompt and the places where its prefill is cut."""
    prompt = draw(st.lists(st.sampled_from([1, 2, IMAGE]), min_size=1, max_size=30))
    cuts = draw(st.sets(st.integers(1, len(prompt)), max_size=6))
    return prompt, sorted({0, len(prompt), *cuts})


@given(prompts())
def test_states_are_the_same_however_the_prefill_is_cut(case: tuple[list[int], list[int]]) -> None:
    prompt, edges = case
    hidden = {layer: torch.randn(len(prompt), WIDTH) for layer in (1, 3)}
    states = RequestStates(ReVisiT(), prompt, [IMAGE], (1, 3))
    for a, b in itertools.pairwise(edges):
        assert states.complete == (IMAGE not in prompt[a:])
        states.write(a, {layer: t[a:b] for layer, t in hidden.items()})
    assert states.complete
    where = [i for i, token in enumerate(prompt) if token == IMAGE]
    if where:
        assert torch.equal(states.matrix(), torch.cat([hidden[1][where], hidden[3][where]]))


def test_what_is_held_is_given_back_with_the_request() -> None:
    before = held().requests
    states = RequestStates(ReVisiT(), [IMAGE] * 4, [IMAGE], (3,))
    assert held().requests == before  # nothing computed yet
    states.write(0, {3: torch.zeros(2, WIDTH)})
    assert held().requests == before + 1
    assert held().bytes >= 4 * WIDTH * 4
    del states
    gc.collect()
    assert held().requests == before


def test_random_draws_belong_to_the_token_not_to_the_call() -> None:
    states = RequestStates(ReVisiT(select="random", seed=5), [IMAGE], [IMAGE], (3,))
    draws = []
    for index in (0, 1, 2, 1, 0, 3):  # as if interrupted and resumed
        states.index = index
        draws.append(states.uniform())
    assert draws[1] == draws[3]
    assert draws[0] == draws[4]
    assert len(set(draws)) == 4


# -- the head -----------------------------------------------------------------------------------------------------


def head(weight: Tensor, start: int, stop: int, summed: Any = None, **more: Any) -> ShardedHead:
    return ShardedHead(weight[start:stop], None, start, stop, summed, lambda states: states @ weight.T, **more)


@settings(deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), st.booleans())
def test_the_sum_over_ranks_is_the_whole_head(ranks: int, ids: list[int], capped: bool) -> None:
    torch.manual_seed(0)
    weight, states = torch.randn(VOCABULARY, WIDTH), torch.randn(7, WIDTH)
    chosen = torch.tensor(ids)
    more = {"soft_cap": 2.0, "scale": 0.5} if capped else {}
    whole = head(weight, 0, VOCABULARY, **more).logits(states, chosen)
    edges = [VOCABULARY * i // ranks for i in range(ranks + 1)]
    parts: list[Tensor] = []

    def add_up(part: Tensor) -> Tensor:  # what an all-reduce does, one rank after the other
        parts.append(part)
        return torch.stack(parts).sum(0)

    for a, b in itertools.pairwise(edges):
        result = head(weight, a, b, add_up, **more).logits(states, chosen)
    torch.testing.assert_close(result, whole)
    expected = states @ weight[chosen].T
    torch.testing.assert_close(whole, torch.tanh(expected / 2) * 2 * 0.5 if capped else expected)


def test_a_head_that_cannot_be_indexed_is_asked_for_everything() -> None:
    weight, states = torch.randn(VOCABULARY, WIDTH), torch.randn(3, WIDTH)
    quantised = ShardedHead(None, None, 0, VOCABULARY, None, lambda s: s @ weight.T)
    ids = torch.tensor([3, 1])
    assert torch.equal(quantised.logits(states, ids), (states @ weight.T)[:, ids])


# -- the step -----------------------------------------------------------------------------------------------------


class Model:
    """States and logits of a few sequences, served in whatever pieces a test likes."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.weight = torch.randn(VOCABULARY, WIDTH)
        self.tap = Tap(lambda: head(self.weight, 0, VOCABULARY), (IMAGE,), DEPTH, False, (1, DEPTH), nn.Identity())

    def sequence(self, prompt: list[int], seed: int) -> dict[int, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {layer: torch.randn(len(prompt) + 10, WIDTH, generator=generator) for layer in (1, DEPTH)}

    def forward(self, pieces: list[tuple[dict[int, Tensor], int, int]]) -> Tensor:
        """Show the tap tokens first..stop of each row, and return the rows' logits."""
        hidden = {layer: torch.cat([s[layer][a:b] for s, a, b in pieces]) for layer in (1, DEPTH)}
        starts = [0]
        for _, a, b in pieces:
            starts.append(starts[-1] + b - a)
        self.tap.observe(hidden[DEPTH], [hidden[1]], Layout([*starts, starts[-1]], [a for _, a, _ in pieces]))
        return torch.stack([s[DEPTH][b - 1] for s, _, b in pieces]) @ self.weight.T

    def wanted(self, method: ReVisiT, sequence: dict[int, Tensor], prompt: list[int], end: int) -> Tensor:
        logits = sequence[DEPTH][end - 1] @ self.weight.T
        layers = (DEPTH,) if method.layers == "last" else (1, DEPTH)
        where = [i for i, token in enumerate(prompt) if token == IMAGE]
        matrix = torch.cat([sequence[layer][where] for layer in layers])
        result = refine(logits, Rows(matrix, head(self.weight, 0, VOCABULARY), False), alpha=method.alpha)
        return scatter(result, VOCABULARY)


def test_rows_are_refined_when_their_prompt_is_finished_and_others_are_untouched() -> None:
    model, method, deep = Model(), ReVisiT(alpha=0.01), ReVisiT(alpha=0.1, layers=(1, DEPTH))
    first, second = [1, IMAGE, IMAGE, 2, 2], [IMAGE, 2, IMAGE]
    a, b, other = (model.sequence(p, i) for i, p in enumerate((first, second, [1, 2])))
    rows = [Row(0, 0, model.tap.open(method, first)), Row(2, 2, model.tap.open(deep, second))]
    raw = model.forward([(a, 0, 2), (other, 0, 2), (b, 0, 3)])  # the first prompt is cut inside its image
    got = model.tap.refine(raw.clone(), rows)
    assert torch.equal(got[:2], raw[:2])
    torch.testing.assert_close(got[2], model.wanted(deep, b, second, 3))
    raw = model.forward([(a, 2, 5), (other, 2, 3), (b, 3, 4)])
    got = model.tap.refine(raw.clone(), rows)
    torch.testing.assert_close(got[0], model.wanted(method, a, first, 5))
    assert torch.equal(got[1], raw[1])
    torch.testing.assert_close(got[2], model.wanted(deep, b, second, 4))
    assert model.tap.counters["steps"] == 3


def test_a_prefill_that_begins_again_forgets_its_first_half() -> None:
    model, method, prompt = Model(), ReVisiT(alpha=0.01), [IMAGE, IMAGE, 2]
    old, new = model.sequence(prompt, 1), model.sequence(prompt, 2)
    row = Row(0, 0, model.tap.open(method, prompt))
    model.tap.refine(model.forward([(old, 0, 1)]), [row])
    model.tap.refine(model.forward([(new, 0, 1)]), [row])  # preempted before the image was whole, and resumed
    assert not row.states.complete
    got = model.tap.refine(model.forward([(new, 1, 3)]), [row])
    torch.testing.assert_close(got[0], model.wanted(method, new, prompt, 3))


def test_missing_states_are_never_decoded_around() -> None:
    model, prompt = Model(), [IMAGE, IMAGE, 2]
    sequence = model.sequence(prompt, 1)
    row = Row(0, 0, model.tap.open(ReVisiT(), prompt))
    logits = model.forward([(sequence, 1, 3)])  # position 0 came from a cache
    with pytest.raises(RevisitError, match="1 of its 2 vision tokens"):
        model.tap.refine(logits, [row])


def test_a_replayed_graph_shows_its_sampled_states_only() -> None:
    model, method, prompt = Model(), ReVisiT(alpha=0.01), [2, IMAGE]
    sequence = model.sequence(prompt, 1)
    states = model.tap.open(method, prompt)
    model.tap.refine(model.forward([(sequence, 0, 1)]), [Row(0, 0, states)])
    model.tap.observe_sampled(sequence[DEPTH][1:2])  # the last prompt token, the image, alone in a replayed graph
    logits = sequence[DEPTH][1:2] @ model.weight.T
    got = model.tap.refine(logits.clone(), [Row(0, 0, states, position=1)])
    torch.testing.assert_close(got[0], model.wanted(method, sequence, prompt, 2))


def test_one_step_never_uses_the_states_of_another() -> None:
    model, prompt = Model(), [IMAGE]
    sequence = model.sequence(prompt, 1)
    model.tap.refine(model.forward([(sequence, 0, 1)]), [])
    assert (model.tap.hidden, model.tap.layout, model.tap.sampled) == (None, None, None)


def test_prompts_without_an_image_are_decoded_plainly_and_counted() -> None:
    model, prompt = Model(), [1, 2]
    sequence = model.sequence(prompt, 1)
    row = Row(0, 0, model.tap.open(ReVisiT(), prompt))
    logits = model.forward([(sequence, 0, 2)])
    assert torch.equal(model.tap.refine(logits.clone(), [row]), logits)
    assert model.tap.counters["requests_without_image"] == 1
