"""The parts of the vLLM plug-in that need no vLLM: requests, states, the sharded head and the step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from revisit import vllm
from revisit.decoding.row_guard import RowGuard
from revisit.errors import RevisitError
from revisit.forward.support import name_support
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.models.head import LinearHead
from revisit.models.spelling import Spelling
from revisit.models.thoughts import Thoughts
from revisit.step.batched import BatchedStep
from revisit.step.choice import withhold
from revisit.step.reference import ReferenceStep, refine_row, scatter
from revisit.vllm import worker
from revisit.vllm.generated_tokens import GeneratedTokens
from revisit.vllm.head import ShardedHead
from revisit.vllm.plan import EXCLUDING, MASKED_LOGIT_GAP, Plan
from revisit.vllm.request import LAYERS_SWITCH, check, kept_layers, parse
from revisit.vllm.states import Row
from revisit.vllm.worker import Worker
from word_tokenizers import train

IMAGE, WIDTH, VOCABULARY, DEPTH, BLOCK = 9, 6, 40, 3, 128


def described(model_type: str, revisit: dict[str, Any] | None = None) -> Any:
    """Make the configurations that recommended settings depend on."""
    generation = SimpleNamespace(revisit=revisit)
    return SimpleNamespace(config=SimpleNamespace(model_type=model_type), generation_config=generation)


LLAVA, QWEN = described("llava"), described("qwen2_5_vl")
THOUGHTS = Thoughts(open=7, close=8)


def make_plan(blocks: int = 8, dtype: torch.dtype = torch.float32, **more: Any) -> Plan:
    return Plan((IMAGE,), DEPTH, False, WIDTH, dtype, blocks, BLOCK, LLAVA, **more)


def params(settings: Any) -> Any:
    """Make the sampling parameters of a request; None does not opt in."""
    return SimpleNamespace(extra_args=None if settings is None else {"revisit": settings})


# -- requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}, {"revisit": None}, {"revisit": False}, {"revisit": 0}])
def test_requests_that_do_not_opt_in_are_unchanged(extra: Any) -> None:
    assert make_plan().admit(extra) is None


@pytest.mark.parametrize("value", [1, True, "1", "true", "revisit", {}, "{}"])
def test_the_name_alone_means_the_recommended_settings(value: Any) -> None:
    assert parse({"revisit": value}, LLAVA) == ReVisiT()
    assert parse({"revisit": value}, described("llava", {"neighbors": 8})) == ReVisiT(neighbors=8)


@pytest.mark.parametrize("value", [{"alpha": 0.1}, '{"alpha": 0.1}', "revisit:alpha=0.1"])
def test_settings_override_the_recommended_ones(value: Any) -> None:
    assert parse({"revisit": value}, QWEN) == ReVisiT(alpha=0.1, layers="all")


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("{alpha", "JSON"),
        ([1, 2], "settings"),
        (7, "settings"),
        ("7", "settings"),
        ({"alhpa": 1}, "Did you mean 'alpha'"),
        ({"alpha": 3}, "alpha must be"),
        ({"alpha": "x"}, "alpha must be"),
        ({"layers": "lats"}, "Did you mean 'last'"),
        ({"layers": "all"}, "REVISIT_VLLM_LAYERS=all"),
        ({"phase": "thought"}, "leave out phase"),  # the tokenizer has no tokens around thoughts
        pytest.param("revisit:" + "a=1," * 1_000_000, "characters", id="long settings"),
        pytest.param('{"alpha": ' * 60_000, "characters", id="long JSON"),
        pytest.param("[" * 1900, "JSON", id="nested"),
        pytest.param(f'{{"alpha": {"[" * 900}{"]" * 900}}}', "alpha must be", id="nested value"),
        pytest.param([[[0] * 1000] * 1000] * 10, "settings", id="long list"),
        pytest.param({"x" * 1_000_000: 1}, "Unknown", id="long name"),
        pytest.param({"alpha": "x" * 1_000_000}, "alpha must be", id="long value"),
        pytest.param({"select": ["soft"] * 10_000}, "select must be", id="list"),
        ({1: 2}, "'1'"),
        *((text, "Unknown") for name in ("self", "cls", "model") for text in ({name: 1}, f"revisit:{name}=1")),
    ],
)
def test_bad_settings_raise_one_sentence(value: Any, part: str) -> None:
    with pytest.raises(RevisitError, match=part) as caught:
        make_plan().admit({"revisit": value})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("settings", [{"select": "random"}, {"once": 1.0}, {"phase": "answer"}])
def test_settings_that_depend_on_earlier_tokens_raise_with_speculation(settings: dict[str, Any]) -> None:
    assert make_plan(thoughts=THOUGHTS).admit({"revisit": settings}) == ReVisiT(**settings)
    with pytest.raises(RevisitError, match="speculative"):
        make_plan(thoughts=THOUGHTS, drafts=2).admit({"revisit": settings})
    assert make_plan(drafts=2).admit({"revisit": 1}) == ReVisiT()


def test_the_server_stores_the_recommended_or_the_configured_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAYERS_SWITCH, raising=False)
    assert kept_layers(QWEN) == "all"
    assert kept_layers(described("llava", {"layers": [1, 3]})) == (1, 3)
    assert kept_layers(LLAVA) == "last"
    monkeypatch.setenv(LAYERS_SWITCH, "1, 3")
    assert kept_layers(LLAVA) == (1, 3)
    check(ReVisiT(layers=(3,)), kept_layers(LLAVA))
    check(ReVisiT(), kept_layers(LLAVA))
    with pytest.raises(RevisitError, match="1,3"):
        check(ReVisiT(layers=(2,)), kept_layers(LLAVA))
    monkeypatch.setenv(LAYERS_SWITCH, "some")
    with pytest.raises(RevisitError, match="layers"):
        kept_layers(LLAVA)


def test_the_plugin_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REVISIT_VLLM", raising=False)
    monkeypatch.setattr(vllm, "register", lambda: pytest.fail("registered"))
    vllm.plugin()
    monkeypatch.setenv("REVISIT_VLLM", "0")
    vllm.plugin()


# -- states -------------------------------------------------------------------------------------------------------


class Model:
    """States and logits of a few sequences, served in any pieces."""

    def __init__(self, blocks: int = 8, vocabulary: int = VOCABULARY, **more: Any) -> None:
        torch.manual_seed(1)
        self.weight = torch.randn(vocabulary, WIDTH)
        self.inputs = torch.randint(vocabulary, (1000,), dtype=torch.int32)  # of every sequence, by position
        self.plan = make_plan(blocks, kept=(1,), **more)
        self.worker = Worker(self.plan, "cpu", lambda: ShardedHead(self.weight), nn.Identity())

    def sequence(self, prompt: list[int], seed: int) -> dict[int, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {layer: torch.randn(len(prompt) + 10, WIDTH, generator=generator) for layer in (1, DEPTH)}

    def add(self, name: str, prompt: list[int], **settings: Any) -> None:
        self.worker.add(name, params(settings), prompt)

    def step(self, pieces: Sequence[tuple[str, dict[int, Tensor], int, int]]) -> tuple[Tensor, Tensor]:
        """Compute positions first..stop of each named sequence in one step; return the raw and the refined logits."""
        inputs = torch.cat([self.inputs[a:b] for _, _, a, b in pieces])
        self.worker.begin(
            [name for name, *_ in pieces], [a for _, _, a, _ in pieces], [b - a for _, _, a, b in pieces], inputs=inputs
        )
        hidden = {layer: torch.cat([s[layer][a:b] for _, s, a, b in pieces]) for layer in (1, DEPTH)}
        self.worker.observe(hidden[DEPTH], [hidden[1]])
        return self.sample(pieces)

    def sample(self, pieces: Sequence[tuple[str, dict[int, Tensor], int, int]]) -> tuple[Tensor, Tensor]:
        sampled = torch.stack([s[DEPTH][b - 1] for _, s, _, b in pieces])
        raw = sampled @ self.weight.T
        return raw, self.worker.refine(raw.clone(), sampled)

    def wanted(
        self, method: ReVisiT, sequence: dict[int, Tensor], prompt: list[int], end: int, draw: float = 0.0
    ) -> Tensor:
        """Return the reference's scores."""
        logits = sequence[DEPTH][end - 1] @ self.weight.T
        layers = (DEPTH,) if method.layers == "last" else (1, DEPTH)
        where = [i for i, token in enumerate(prompt) if token == IMAGE]
        states = torch.cat([sequence[layer][where] for layer in layers])
        written = self.inputs[len(prompt) : end]
        result = refine_row(logits, states, ShardedHead(self.weight), method.rule(), draw, written)
        return scatter(result, logits)


@st.composite
def prompts(draw: Any) -> tuple[list[int], list[int]]:
    """Draw a prompt and the positions where its prefill is split."""
    prompt = draw(st.lists(st.sampled_from([1, 2, IMAGE]), min_size=1, max_size=30))
    cuts = draw(st.sets(st.integers(1, len(prompt)), max_size=6))
    return prompt, sorted({0, len(prompt), *cuts})


@settings(deadline=None)
@given(prompts(), st.integers(1, 20))
def test_states_do_not_depend_on_how_the_prefill_is_split(case: tuple[list[int], list[int]], repeat: int) -> None:
    prompt, edges = [token for token in case[0] for _ in range(repeat)], [edge * repeat for edge in case[1]]
    model = Model(blocks=16)
    sequence = model.sequence(prompt, 3)
    model.add("a", prompt, layers=(1, DEPTH))
    request = model.worker.requests["a"]
    for a, b in itertools.pairwise(edges):
        assert request.complete == (IMAGE not in prompt[a:])
        model.step([("a", sequence, a, b)])
    assert request.complete
    where = [i for i, token in enumerate(prompt) if token == IMAGE]
    kept = model.worker.pool.rows([request.blocks], [request.states]).row(0)
    assert torch.equal(kept, torch.cat([sequence[1][where], sequence[DEPTH][where]]))


def test_blocks_are_taken_by_a_request_and_stay_until_the_scheduler_drops_them() -> None:
    model = Model(blocks=4)
    model.add("a", [IMAGE] * (BLOCK + 1))
    model.add("b", [IMAGE] * 3, layers=(1, DEPTH))
    model.add("c", [1, 2])
    assert [len(model.worker.requests[name].blocks) for name in "abc"] == [2, 1, 0]
    model.add("a", [IMAGE] * (BLOCK + 1))  # enters again, after a preemption
    for name in "abcd":
        model.worker.remove(name)
    assert model.worker.pool.used == 3
    model.add("e", [IMAGE] * (BLOCK + 1))  # without room it is ended, alone
    assert model.worker.take_failed() == {"e"}
    model.worker.drop("abcd")
    assert model.worker.pool.used == 0
    model.add("e", [IMAGE] * (BLOCK + 1))
    assert model.worker.take_failed() == frozenset()


@pytest.mark.usefixtures("either_step")
def test_requests_with_the_same_images_share_their_states() -> None:
    """Whether or not the request that computed them has ended, in one step or in several."""
    model, method, image = Model(), ReVisiT(alpha=0.01), [1, IMAGE, IMAGE, 2]
    longer = [*image, 2, 1]
    a = model.sequence(image, 1)
    b, c = (
        {layer: torch.cat([a[layer][:3], other[layer][3:]]) for layer in a}
        for other in (model.sequence(longer, seed) for seed in (2, 3))
    )
    model.add("a", image, alpha=0.01)
    model.step([("a", a, 0, 4)])
    model.worker.add("b", params({"alpha": 0.01}), longer, "a")
    model.worker.add("c", params({"alpha": 0.01}), longer, "a")
    # The prefix cache had four tokens of the first, and none of the last.
    _, got = model.step([("b", b, 4, 6), ("a", a, 4, 5), ("c", c, 0, 6)])
    for row, (prompt, sequence, end) in enumerate([(longer, b, 6), (image, a, 5), (longer, c, 6)]):
        torch.testing.assert_close(got[row], model.wanted(method, sequence, prompt, end))
    model.worker.remove("a")
    _, got = model.step([("c", c, 6, 7)])
    torch.testing.assert_close(got[0], model.wanted(method, c, longer, 7))
    assert model.worker.pool.used == 1
    model.worker.drop(["a"])
    model.worker.add("d", params({}), longer, "x")  # of a request that never came here
    assert model.worker.take_failed() == {"d"}
    assert model.worker.pool.used == 0
    model.add("e", image)
    model.worker.add("f", params({}), longer, ("e", ()))  # whose states were not computed
    assert model.worker.take_failed() == {"f"}


def test_a_request_that_can_never_fit_raises() -> None:
    plan = make_plan(blocks=2)
    assert plan.need(ReVisiT(), scheduled("a", [IMAGE] * 2 * BLOCK, 1)) is not None
    with pytest.raises(RevisitError, match=f"{2 * BLOCK + 1} states"):
        plan.need(ReVisiT(), scheduled("a", [IMAGE] * (2 * BLOCK + 1), 1))
    with pytest.raises(RevisitError, match=f"{BLOCK + 1} vision tokens at 2 layers"):
        plan.need(ReVisiT(layers=(1, DEPTH)), scheduled("a", [IMAGE] * (BLOCK + 1), 1))


# -- the head -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=12), st.booleans())
def test_the_sum_over_ranks_is_the_whole_head(ranks: int, ids: list[int], capped: bool) -> None:
    torch.manual_seed(0)
    weight, bias, states = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY), torch.randn(2, 7, WIDTH)
    chosen = torch.tensor([ids, ids[::-1]])  # (2, k)
    transform = (lambda x: torch.tanh(x / 2)) if capped else None
    whole = ShardedHead(weight, bias, transform).logits(states, chosen)
    edges = [VOCABULARY * i // ranks for i in range(ranks + 1)]
    shards = [(weight[a:b], bias[a:b], transform, a) for a, b in itertools.pairwise(edges)]
    summed: list[list[Tensor]] = []  # arguments of each rank's collectives, in order

    for shard in shards:
        summed.append([])
        ShardedHead(*shard, lambda part: summed[-1].append(part) or part).logits(states, chosen)
    sums = iter([torch.stack(parts).sum(0) for parts in zip(*summed, strict=True)])
    result = ShardedHead(*shards[0], lambda _: next(sums)).logits(states, chosen)
    assert torch.equal(result, whole)
    for shard in shards:
        summed.append([])
        ShardedHead(*shard, lambda part: summed[-1].append(part) or part, VOCABULARY).all_logits(states[0])
    everything = torch.stack([parts[0] for parts in summed[ranks:]]).sum(0)
    torch.testing.assert_close(everything, ShardedHead(weight, bias, transform).all_logits(states[0]))
    expected = states @ weight[chosen].mT + bias[chosen].unsqueeze(1)
    torch.testing.assert_close(whole, torch.tanh(expected / 2) if capped else expected)


# -- the step -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cached", "batched"])
def either_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take steps row by row, as on a CPU, and for the whole batch, as on a GPU without Triton."""
    if request.param == "batched":
        steps = {True: BatchedStep, False: ReferenceStep}
        monkeypatch.setattr(worker, "choose", lambda head, rule, _: steps[rule.usual](head, rule))


@pytest.mark.usefixtures("either_step")
def test_rows_are_refined_once_their_prompt_is_computed_and_others_are_unchanged() -> None:
    model, method, deep = Model(), ReVisiT(alpha=0.01), ReVisiT(alpha=0.1, layers=(1, DEPTH))
    first, second = [1, IMAGE, IMAGE, 2, 2], [IMAGE, 2, IMAGE]
    a, b, other = (model.sequence(p, i) for i, p in enumerate((first, second, [1, 2])))
    model.add("a", first, alpha=0.01)
    model.add("b", second, alpha=0.1, layers=(1, DEPTH))
    model.add("x", [1, 2])  # has no image
    raw, got = model.step([("a", a, 0, 2), ("x", other, 0, 2), ("b", b, 0, 3)])  # the first is cut inside its image
    assert torch.equal(got[:2], raw[:2])
    torch.testing.assert_close(got[2], model.wanted(deep, b, second, 3))
    raw, got = model.step([("x", other, 2, 3), ("b", b, 3, 4), ("a", a, 2, 5)])  # in another order
    torch.testing.assert_close(got[2], model.wanted(method, a, first, 5))
    assert torch.equal(got[0], raw[0])
    torch.testing.assert_close(got[1], model.wanted(deep, b, second, 4))
    raw, got = model.sample([("b", b, 3, 4)])  # log-probabilities of a prompt, which are computed after the step
    assert torch.equal(got, raw)


SETTINGS: list[dict[str, Any]] = [
    {"alpha": 0.01},
    {"alpha": 0.01, "divergence": "official", "normalize": False},
    {"alpha": 0.01, "fusion": "interpolation", "weight": 0.3, "select": "max"},
    {"alpha": 0.5, "divergence": "kl"},
    {"vocabulary": "full", "divergence": "cosine"},
]


@pytest.mark.usefixtures("either_step")
@pytest.mark.parametrize("shares", [(0, 1, 2, 3, 4), (0,)])
def test_rows_of_different_sizes_and_settings_agree_with_the_reference(shares: tuple[int, ...]) -> None:
    model = Model(blocks=64)
    prompts = [[1] + [IMAGE] * (1 + 37 * i % 300) + [2] for i in range(24)]
    sequences = [model.sequence(prompt, i) for i, prompt in enumerate(prompts)]
    chosen = [SETTINGS[shares[i % len(shares)]] for i in range(24)]
    for i, prompt in enumerate(prompts):
        model.add(str(i), prompt, **chosen[i])
    _, got = model.step([(str(i), s, 0, len(p)) for i, (p, s) in enumerate(zip(prompts, sequences, strict=True))])
    for i, prompt in enumerate(prompts):
        wanted = model.wanted(ReVisiT(**chosen[i]), sequences[i], prompt, len(prompt))
        torch.testing.assert_close(got[i], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("either_step")
@pytest.mark.parametrize("settings", [*SETTINGS, {"alpha": 0.01, "neighbors": 3}])
def test_every_candidate_of_a_speculation_is_refined(settings: dict[str, Any]) -> None:
    model, method = Model(blocks=64), ReVisiT(**settings)
    prompts = [[IMAGE] * (3 + 150 * i) + [2] for i in range(3)]
    sequences = [model.sequence(prompt, i) for i, prompt in enumerate(prompts)]
    for i, prompt in enumerate(prompts[:2]):
        model.add(str(i), prompt, **settings)
    model.step([(str(i), sequences[i], 0, len(prompts[i])) for i in range(2)])
    # The second did not get candidates, the third did not opt in, and the fourth computes its prompt.
    model.add("3", prompts[2], **settings)
    firsts, counts, drafts = [len(prompts[0]), len(prompts[1]), 5, 0], [4, 1, 2, len(prompts[2])], [3, 0, 1, 0]
    model.worker.begin(["0", "1", "x", "3"], firsts, counts, drafts)
    used = [sequences[0], sequences[1], sequences[1], sequences[2]]
    hidden = {k: torch.cat([s[k][a : a + n] for s, a, n in zip(used, firsts, counts, strict=True)]) for k in (1, DEPTH)}
    model.worker.observe(hidden[DEPTH], [hidden[1]])
    ends = [(0, firsts[0] + i) for i in (1, 2, 3, 4)] + [(1, firsts[1] + 1), (1, 6), (1, 7), (2, len(prompts[2]))]
    raw = torch.stack([sequences[i][DEPTH][end - 1] for i, end in ends]) @ model.weight.T
    got = model.worker.refine(raw.clone(), raw)
    for row, (i, end) in enumerate(ends):
        wanted = raw[row] if row in (5, 6) else model.wanted(method, sequences[i], prompts[i], end)
        torch.testing.assert_close(got[row], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("either_step")
def test_a_prefill_that_starts_again_drops_its_states() -> None:
    model, prompt = Model(), [IMAGE, IMAGE, 2]
    old, new = model.sequence(prompt, 1), model.sequence(prompt, 2)
    model.add("a", prompt, alpha=0.01)
    model.step([("a", old, 0, 1)])
    model.step([("a", new, 0, 1)])  # preempted before the image was whole, and resumed
    assert not model.worker.requests["a"].complete
    _, got = model.step([("a", new, 1, 3)])
    torch.testing.assert_close(got[0], model.wanted(ReVisiT(alpha=0.01), new, prompt, 3))
    _, got = model.step([("a", old, 0, 4)])  # preempted with a token decoded
    torch.testing.assert_close(got[0], model.wanted(ReVisiT(alpha=0.01), old, prompt, 4))


@pytest.mark.usefixtures("either_step")
def test_once_limits_the_tokens_that_each_request_has_generated() -> None:
    model, method, changed = Model(), ReVisiT(alpha=1e-4, once=1.0), 0
    model.inputs %= 9  # few different tokens
    prompts = {"a": [IMAGE, IMAGE, 2], "b": [1, IMAGE], "c": [IMAGE, 1, 2, 1]}
    sequences = {name: model.sequence(prompt, i) for i, (name, prompt) in enumerate(prompts.items())}
    for name in "ab":
        model.add(name, prompts[name], alpha=1e-4, once=1.0)
    for batch in (
        [("a", 0, 3), ("b", 0, 2)],
        [("b", 2, 3), ("a", 3, 4)],
        [("a", 4, 8), ("b", 3, 4)],  # several tokens at once, of which the last is followed by a new one
        [("b", 0, 3)],  # preempted, and computed again in two parts
        [("a", 8, 9), ("b", 3, 6)],
        [("a", 6, 7), ("b", 6, 7)],  # drafts were rejected: the tokens behind do not count
    ):
        _, got = model.step([(name, sequences[name], first, stop) for name, first, stop in batch])
        for row, (name, _, stop) in enumerate(batch):
            want, plain = (model.wanted(m, sequences[name], prompts[name], stop) for m in (method, ReVisiT(alpha=1e-4)))
            torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-4)
            changed += not torch.allclose(want, plain, rtol=1e-3, atol=1e-3)
    assert changed > 4
    model.worker.remove("b")
    model.add("c", prompts["c"], alpha=1e-4, once=1.0)  # gets the slot of the request that ended
    assert model.worker.requests["c"].slot == 1 - (model.worker.requests["a"].slot or 0)
    _, got = model.step([("c", sequences["c"], 0, 5)])
    torch.testing.assert_close(got[0], model.wanted(method, sequences["c"], prompts["c"], 5), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("either_step")
@pytest.mark.parametrize("phase", ["answer", "thought"])
def test_rows_outside_their_phase_are_unchanged(phase: str) -> None:
    """Thoughts opened by the prompt, opened by the answer, closed, and opened again, in one batch."""
    model, method = Model(thoughts=THOUGHTS), ReVisiT(alpha=0.01)
    prompts = {"a": [7, IMAGE, 8, 2], "b": [IMAGE, 2, 7], "c": [IMAGE, 2, 2]}
    sequences = {name: model.sequence(prompt, i) for i, (name, prompt) in enumerate(prompts.items())}
    for name in "ab":
        model.add(name, prompts[name], alpha=0.01, phase=phase)
    model.add("c", prompts["c"], alpha=0.01)
    model.inputs[3:9] = torch.tensor([5, 7, 5, 8, 7, 5])
    thought = {"a": [False, True, True, False, True], "b": [True, True, True, True, False]}
    for number in range(5):
        ends = [(name, len(prompts[name]) + number) for name in "abc"]
        pieces = [(name, sequences[name], end - 1 if number else 0, end) for name, end in ends]
        raw, got = model.step(pieces)
        for row, (name, end) in enumerate(ends):
            acts = name == "c" or thought[name][number] == (phase == "thought")
            wanted = model.wanted(method, sequences[name], prompts[name], end) if acts else raw[row]
            torch.testing.assert_close(got[row], wanted, rtol=1e-4, atol=1e-4)


def test_long_answers_are_stored() -> None:
    generated = GeneratedTokens(torch.device("cpu"))
    slots = [generated.take_slot() for _ in range(3)]
    inputs = torch.arange(2000, dtype=torch.int32)
    for first in range(0, 900, 100):
        generated.store(inputs, [(slot, first, 300 * slot + first, 100) for slot in slots])
    got = generated.read([slots[2], slots[0]], [900, 3])
    assert got[0].tolist() == list(range(300 * slots[2], 300 * slots[2] + 900))
    assert got[1].tolist() == [*range(300 * slots[0], 300 * slots[0] + 3), *[-1] * 897]


@pytest.mark.usefixtures("either_step")
def test_the_blocks_of_a_request_need_not_be_adjacent() -> None:
    model, method = Model(), ReVisiT(alpha=1e-4, layers=(1, DEPTH), weight="agreement", neighbors=3)
    for name in "abc":
        model.add(name, [IMAGE])
    model.worker.drop("b")
    prompt = [IMAGE] * (BLOCK + 5) + [2]
    model.add("d", prompt, alpha=1e-4, layers=(1, DEPTH), weight="agreement", neighbors=3)
    assert model.worker.requests["d"].blocks.tolist() == [1, 3, 4]
    sequence = model.sequence(prompt, 7)
    for end in (len(prompt), len(prompt) + 1):  # with many candidates, far enough apart for rounding
        first = 0 if end == len(prompt) else len(prompt)
        _, got = model.step([("d", sequence, first, end)])
        torch.testing.assert_close(got[0], model.wanted(method, sequence, prompt, end))


def test_a_compiled_model_that_returns_other_layers_raises() -> None:
    model = Model()
    model.worker.begin([], [], [])
    with pytest.raises(RevisitError, match="torch_compile_cache"):
        model.worker.observe(torch.zeros(2, WIDTH), [])


def test_missing_states_end_their_own_request_only() -> None:
    model, prompt = Model(), [IMAGE, IMAGE, 2]
    a, b = model.sequence(prompt, 1), model.sequence(prompt, 2)
    model.add("a", prompt, alpha=0.01)
    model.add("b", prompt, alpha=0.01)
    raw, got = model.step([("a", a, 1, 3), ("b", b, 0, 3)])  # position 0 of the first came from a cache
    assert torch.equal(got[0], raw[0])
    torch.testing.assert_close(got[1], model.wanted(ReVisiT(alpha=0.01), b, prompt, 3))
    assert model.worker.take_failed() == {"a"}
    assert model.worker.take_failed() == frozenset()


def break_steps(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]) -> list[int]:
    """Make every step fail that includes a request; return the sizes of all steps."""
    take, sizes = Worker._take_step, []

    def broken(self: Worker, logits: Tensor, group: Sequence[Row]) -> None:
        sizes.append(len(group))
        if any(row.request.name == name for row in group):
            raise kind("broken")
        take(self, logits, group)

    monkeypatch.setattr(Worker, "_take_step", broken)
    return sizes


def test_an_error_in_one_request_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = Model(), [IMAGE, 2]
    sequences = {name: model.sequence(prompt, i) for i, name in enumerate("abcd")}
    for name in "abcd":
        model.add(name, prompt, alpha=0.01)
    break_steps(monkeypatch, "c", torch.OutOfMemoryError)
    raw, got = model.step([(name, s, 0, 2) for name, s in sequences.items()])
    assert torch.equal(got[2], raw[2])
    for i in (0, 1, 3):
        torch.testing.assert_close(got[i], model.wanted(ReVisiT(alpha=0.01), sequences["abcd"[i]], prompt, 2))
    assert model.worker.take_failed() == {"c"}


@pytest.mark.parametrize("kind", [RevisitError, torch.OutOfMemoryError])
def test_tensor_parallel_ranks_never_retry(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry issues collectives that ranks without the error do not: groups fail whole, and only for common errors."""
    model, prompt = Model(ranks=2), [IMAGE, 2]
    pieces = [(name, model.sequence(prompt, i), 0, 2) for i, name in enumerate("ab")]
    for name in "ab":
        model.add(name, prompt, alpha=0.01)
    sizes = break_steps(monkeypatch, "a", kind)
    if kind is RevisitError:  # the same on all ranks
        raw, got = model.step(pieces)
        assert torch.equal(raw, got)
        assert model.worker.take_failed() == {"a", "b"}
    else:
        with pytest.raises(kind):
            model.step(pieces)
    assert sizes == [2]


# -- a floor on the support of names ------------------------------------------------------------------------------

NAMES = (("dog",), ("cat",), ("dining table", "table"))


class Named(Model):
    """A model that can write names, of which the images support the first tokens differently."""

    def __init__(self, **more: Any) -> None:
        self.tokenizer = train("bytes")
        super().__init__(blocks=16, vocabulary=len(self.tokenizer), tokenizer=self.tokenizer, **more)
        self.spelling = Spelling(self.tokenizer, NAMES)

    def support(self, sequence: dict[int, Tensor], prompt: list[int], layer: int = DEPTH) -> dict[str, float]:
        states = sequence[layer][[i for i, token in enumerate(prompt) if token == IMAGE]]
        return name_support(LinearHead(self.weight), states, self.spelling)

    def blocked(self, support: dict[str, float], floor: float, written: list[int]) -> Tensor:
        mask = torch.zeros(len(self.tokenizer), dtype=torch.bool)
        mask[RowGuard(self.spelling, support, floor).blocked(written)] = True
        return mask


@pytest.mark.usefixtures("either_step")
def test_names_below_the_floor_are_withheld_in_every_kind_of_row() -> None:
    model, method = Named(), ReVisiT(alpha=0.01)
    prompts = {
        "refined": [IMAGE] * 5 + [2],
        "greedy": [1, IMAGE, IMAGE],
        "deep": [IMAGE] * 3,
        "free": [IMAGE, 2],
        "text": [2, 2],
    }
    sequences = {name: model.sequence(prompt, i) for i, (name, prompt) in enumerate(prompts.items())}
    supports = {name: model.support(sequences[name], prompts[name]) for name in ("refined", "greedy")}
    supports["deep"] = model.support(sequences["deep"], prompts["deep"], layer=1)
    floors = {name: sorted(support.values())[1] + 1e-6 for name, support in supports.items()}
    shared = {"names": NAMES, "alpha": 0.01}
    model.add("refined", prompts["refined"], floor=floors["refined"], **shared)
    model.add("greedy", prompts["greedy"], method="greedy", floor=floors["greedy"], names=NAMES)
    model.add("deep", prompts["deep"], floor=floors["deep"], floor_layer=1, **shared)
    model.add("free", prompts["free"], alpha=0.01)
    model.add("text", prompts["text"], floor=1.0, **shared)  # has no image
    for number in range(4):
        ends = {name: len(prompt) + number for name, prompt in prompts.items()}
        pieces = [(name, sequences[name], end - 1 if number else 0, end) for name, end in ends.items()]
        raw, got = model.step(pieces)
        assert torch.equal(got[4], raw[4])
        for row, (name, end) in enumerate(ends.items()):
            if name == "text":
                continue
            scores = raw[row] if name == "greedy" else model.wanted(method, sequences[name], prompts[name], end)
            if name in supports:
                written = model.inputs[len(prompts[name]) : end].tolist()
                mask = model.blocked(supports[name], floors[name], written)
                assert mask.any()
                assert not got[row][mask].isfinite().any()
                scores = withhold(scores[None], raw[row][None], mask)[0]
            torch.testing.assert_close(got[row], scores, rtol=1e-4, atol=1e-4)


def test_a_row_with_withheld_tokens_only_gets_its_own_logits_without_them() -> None:
    model, prompt = Named(), [IMAGE, 2]
    sequence = model.sequence(prompt, 1)
    (dog,) = model.tokenizer.encode(" dog", add_special_tokens=False)
    model.weight[dog] += 4 * sequence[DEPTH][1]  # the only plausible token
    settings = {"alpha": 1.0, "floor": 1.0, "names": NAMES}
    model.add("a", prompt, **settings)
    model.worker.add(
        "b", SimpleNamespace(extra_args={"revisit": settings}, structured_outputs={"choice": ["dog"]}), prompt
    )
    raw, got = model.step([("a", sequence, 0, 2), ("b", sequence, 0, 2)])
    assert int(raw[0].argmax()) == dog
    mask = model.blocked(dict.fromkeys(("dog", "cat", "dining table"), 0.0), 1.0, [])
    assert torch.equal(got[0], raw[0].masked_fill(mask, -torch.inf))
    assert int(got[1].argmax()) == int(got[0].argmax())
    assert got[1].isfinite().all()
    assert int(torch.where(mask, got[1], -torch.inf).argmax()) == dog  # where a schema allows nothing else
    model.inputs[2] = dog
    model.step([("a", sequence, 2, 3), ("b", sequence, 2, 3)])
    assert model.worker.counts[worker.OVERRULED] == 2


def test_names_are_withheld_in_the_answer_and_not_in_thoughts() -> None:
    model, prompt = Named(thoughts=THOUGHTS), [IMAGE, IMAGE, THOUGHTS.open]
    sequence = model.sequence(prompt, 1)
    model.add("a", prompt, method="greedy", floor=1.0, names=NAMES)
    model.inputs[3:5] = torch.tensor([2, THOUGHTS.close])  # the thought goes on for a token, then ends
    mask = model.blocked(model.support(sequence, prompt), 1.0, [])
    for first, end, thinks in [(0, 3, True), (3, 4, True), (4, 5, False)]:
        raw, got = model.step([("a", sequence, first, end)])
        torch.testing.assert_close(got[0], raw[0] if thinks else raw[0].masked_fill(mask, -torch.inf))


def test_supports_are_computed_once_for_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, calls = Named(), [IMAGE, IMAGE, 2], []
    monkeypatch.setattr(worker, "name_support", lambda *given: calls.append(given) or name_support(*given))
    sequence = model.sequence(prompt, 1)
    model.add("a", prompt, floor=0.5, names=NAMES)
    model.step([("a", sequence, 0, 3)])
    for name, chosen in (("b", {"floor": 0.2}), ("c", {"method": "greedy", "floor": 0.5})):
        model.worker.add(name, params({**chosen, "names": NAMES}), prompt, "a")
        model.step([(name, sequence, 2, 3)])
    assert len(calls) == 1
    for name in "abc":
        model.worker.remove(name)
    model.worker.drop(["a"])
    assert not model.worker._supports


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"floor": 0.1, "floor_layer": 2}, "REVISIT_VLLM_LAYERS=2"),
        ({"floor": 0.1, "floor_layer": 9}, "from 0 to 3"),
        ({"floor": 0.1, "names": [["§§"]]}, "cannot begin"),
        ({"floor": 0.1, "names": ["/etc/hostname"]}, "reads no file"),
        ({"floor": 0.1, "names": "/etc/hostname"}, "reads no file"),
        ({"method": "vcd"}, "revisit and greedy"),
        ({"method": "greedy", "alpha": 1}, "alpha"),
    ],
)
def test_a_wrong_floor_raises_on_arrival(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(RevisitError, match=part):
        make_plan(tokenizer=train("bytes"), kept=(1,)).admit({"revisit": settings})


def test_plain_decoding_needs_a_floor_to_opt_in() -> None:
    assert make_plan().admit({"revisit": "greedy"}) is None
    assert make_plan(tokenizer=train("bytes")).admit({"revisit": "greedy:floor=0.1"}) == Greedy(floor=0.1)
    with pytest.raises(RevisitError, match="tokenizer of transformers"):
        make_plan().admit({"revisit": {"floor": 0.1}})


def scheduled(name: str, prompt: list[int], settings: Any, image: str = "x", **more: Any) -> Any:
    """Make a request as a scheduler has it."""
    feature = SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=0))
    return SimpleNamespace(
        request_id=name,
        sampling_params=params(settings),
        prompt_token_ids=prompt,
        mm_features=[feature],
        **{
            "skip_reading_prefix_cache": False,
            "num_computed_tokens": 0,
            "num_preemptions": 0,
            "cache_salt": None,
            **more,
        },
    )


def test_requests_with_the_same_vision_states_have_the_same_key() -> None:
    plan, method, prompt = make_plan(), ReVisiT(), [1, IMAGE, IMAGE, 2]
    first = plan.need(method, scheduled("a", prompt, 1))
    assert first is not None
    assert (first.blocks, first.last) == (1, 2)
    assert plan.need(ReVisiT(alpha=0.1), scheduled("b", [*prompt, 1, 1], 1)) == first  # a second turn, other settings
    others = [
        plan.need(method, scheduled("c", [2, *prompt[1:]], 1)),
        plan.need(method, scheduled("c", prompt, 1, image="y")),
        plan.need(method, scheduled("c", prompt, 1, cache_salt="mine")),
        plan.need(ReVisiT(layers=(1,)), scheduled("c", prompt, 1)),
        plan.need(ReVisiT(layers=(1,), norm="final"), scheduled("c", prompt, 1)),
        plan.need(method, scheduled("c", [*prompt, IMAGE], 1)),
    ]
    assert len({first.key, *(other.key for other in others if other is not None)}) == 7
    assert plan.need(method, scheduled("d", [1, 2], 1)) is None


@pytest.mark.parametrize("drafts", [0, 2])
def test_states_of_a_replayed_graph_come_from_the_sampled_rows(drafts: int) -> None:
    """The last prompt token is a vision token and has a step of its own, which vLLM may pad with candidates."""
    model, prompt = Model(), [2, IMAGE]
    sequence = model.sequence(prompt, 1)
    model.add("a", prompt, alpha=0.01)
    model.step([("a", sequence, 0, 1)])
    model.worker.begin(["x", "a"], [5, 1], [1 + drafts] * 2, [drafts] * 2)
    sampled = torch.cat([sequence[DEPTH][first : first + 1 + drafts] for first in (5, 1)])
    got = model.worker.refine(sampled @ model.weight.T, sampled)
    torch.testing.assert_close(got[1 + drafts], model.wanted(ReVisiT(alpha=0.01), sequence, prompt, 2))


def test_half_precision_logits_are_refined_in_float32() -> None:
    model, prompt = Model(), [IMAGE, 2]
    sequence = model.sequence(prompt, 1)
    model.add("a", prompt, alpha=0.01)
    model.worker.begin(["a", "x"], [0, 0], [2, 1])
    model.worker.observe(torch.cat([sequence[DEPTH][:2], sequence[DEPTH][:1]]), [torch.cat([sequence[1][:2]] * 2)[:3]])
    raw = torch.randn(2, VOCABULARY).bfloat16()
    got = model.worker.refine(raw, sequence[DEPTH][:2])
    assert got.dtype == torch.float32
    assert torch.equal(got[1], raw[1].float())
    torch.testing.assert_close(got[0].exp().sum(), torch.tensor(1.0))


@pytest.mark.usefixtures("either_step")
@pytest.mark.parametrize("server", [{}, {"processors": True}])
def test_implausible_tokens_are_impossible_unless_the_plausible_ones_may_be_excluded(server: dict[str, Any]) -> None:
    model, prompt = Model(blocks=16, **server), [IMAGE, IMAGE, 2]
    sequence = model.sequence(prompt, 1)
    for name in ("plain", *EXCLUDING):
        model.worker.add(name, SimpleNamespace(extra_args={"revisit": {"alpha": 0.1}}, **{name: {"a": 1}}), prompt)
    raw, got = model.step([(name, sequence, 0, 3) for name in model.worker.requests])
    wanted = model.wanted(ReVisiT(alpha=0.1), sequence, prompt, 3)
    assert not wanted.isfinite().all()
    finite = torch.maximum(wanted, raw[0] - MASKED_LOGIT_GAP)
    torch.testing.assert_close(got[0], finite if server else wanted)
    torch.testing.assert_close(got[1:], finite.expand(len(EXCLUDING), -1))


def test_the_memory_of_a_worker_does_not_grow_with_requests() -> None:
    model = Model(blocks=2)
    for i in range(500):
        prompt = [IMAGE] * (1 + i % BLOCK)
        model.add(str(i), prompt, alpha=0.01 + i / 1e4)  # different settings each time
        model.step([(str(i), model.sequence(prompt, i), 0, len(prompt))])
        model.worker.remove(str(i))
        model.worker.drop([str(i)])
    assert model.worker.pool.used == 0
    assert not model.worker.requests
    assert len(model.worker._groups) <= 1


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_largest_step_of_the_memory_profile_changes_nothing(drafts: int) -> None:
    model = Model(blocks=5, drafts=drafts)
    model.worker.pool.states.zero_()
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    model.worker.rehearse(logits)
    assert torch.equal(logits, before)
    assert model.worker.rehearsed
    assert model.worker.pool.used == 0
