"""The methods' arithmetic against vectors computed in float64 from the published rules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from revisit import SADT, VAF, VISTA, DeCo, MemVR, MiddleLayers
from revisit.decoding.contrastive import contrast, cut
from revisit.decoding.method import Method, layers_of, layers_of_32
from revisit.methods import avisc, code, deco, dola, m3id, pai, ritual, sid, vcd

INF = -math.inf
CLEAN = [5.0, 4.0, 3.2, 1.0]
OTHER = [5.5, 3.0, 3.5, 0.0]


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), atol=1e-5, rtol=0)


def test_dola_prefers_the_layer_that_differs_most() -> None:
    final = t(3, 2.5, 1, -2, 0)
    early = torch.stack([t(1, 2.5, 0, 0, 0), t(2.8, 2.4, 1.1, -1.8, 0.1)])
    apart = dola.divergences(final[None], early[None])
    close(apart[0], [0.025069, 0.000239])
    assert int(apart.argmax()) == 0
    close(dola.contrast_layers(final, early[0], 0.1), [1.297952, -0.702048, 0.297952, INF, INF])
    close(dola.contrast_layers(t(3, 1), t(1, 2), 0.0), [2.0, -1.0])  # without a cut: raw logits


@pytest.mark.parametrize(("beta", "want"), [(0.1, [4.5, 5.0, 2.9, INF]), (0.2, [4.5, 5.0, INF, INF])])
def test_vcd(beta: float, want: list[float]) -> None:
    close(contrast(t(*CLEAN), t(*OTHER), 1.0, beta), want)


NOISE = {
    0: (0.999989, 0.004726),
    500: (0.863017, 0.505175),
    700: (0.592677, 0.805440),
    999: (0.285042, 0.958515),
}


@pytest.mark.parametrize("step", NOISE)
def test_noise_schedule(step: int) -> None:
    assert vcd.noise_coefficients(step) == pytest.approx(NOISE[step], abs=1e-6)


@pytest.mark.parametrize(
    ("step", "want"),
    [
        (0, [-0.439218, -1.439218, -2.239218, INF]),
        (1, [-0.444049, -1.413747, -2.240009, INF]),
        (50, [-0.850116, 0.727307, -2.306460, INF]),
    ],
)
def test_m3id(step: int, want: list[float]) -> None:
    w = m3id.weight(step, 0.02)
    close(m3id.contrast_text(t(*CLEAN), t(*OTHER), w, 0.1, normalize=True), want)
    raw = m3id.contrast_text(t(*CLEAN), t(*OTHER), w, 0.1)
    close(raw.log_softmax(-1), torch.tensor(want, dtype=torch.float64).log_softmax(-1).tolist())


def test_m3id_weight_has_a_cap_and_stays_finite() -> None:
    assert m3id.weight(400, 0.02, cap=5.0) == 5.0
    assert math.isfinite(m3id.weight(100_000, 0.02) * 100)


def test_m3id_gate_leaves_sure_steps_alone() -> None:
    sure = t(9, 1, 0, 0)  # p = 0.999
    close(m3id.contrast_text(sure, t(*OTHER), 2.0, 0.0, gate=0.3), sure.tolist())
    unsure = t(1, 1, 1, 1)  # p = 0.25
    close(m3id.contrast_text(unsure, t(*OTHER), 2.0, 0.0, gate=0.3), (unsure + 2 * (unsure - t(*OTHER))).tolist())


@pytest.mark.parametrize(
    ("power", "divergence", "want"),
    [(0.7, 0.331704, [4.665852, 4.668296, INF, INF]), (0.2, 0.728742, [4.864371, INF, INF, INF])],
)
def test_code(power: float, divergence: float, want: list[float]) -> None:
    p, q = t(*CLEAN).softmax(-1), t(*OTHER).softmax(-1)
    assert float(code.bounded_divergence(p, q, power)) == pytest.approx(divergence, abs=1e-5)
    close(code.contrast_description(t(*CLEAN), t(*OTHER), power), want)


def test_deco() -> None:
    logits, early = t(4, 3.8, 2, 0), torch.stack([t(1, 3, 0.5, 0), t(3, 2, 1, 0)])
    assert deco.candidates(logits, 0.9, 20).tolist() == [True, True, False, False]
    assert deco.candidates(torch.zeros(50), 0.9, 20).sum() == 20
    scores, layer = deco.correct(logits[None], early[None], 0.6, 0.9, 20)
    assert layer.tolist() == [0]
    close(scores[0], [4.473482, 5.220446, INF, INF])


@pytest.mark.parametrize(
    ("published", "depth", "want"),
    [
        ((20, 28), 32, range(20, 29)),  # DeCo's
        ((20, 28), 28, range(18, 25)),
        ((20, 28), 4, range(2, 4)),
        ((26, 32), 32, range(26, 32)),  # VISTA's, to the last early layer
        ((26, 32), 28, range(23, 28)),
        ((26, 32), 64, range(52, 64)),
        ((7, 16), 32, range(7, 17)),  # MemVR's
        ((7, 16), 2, range(1, 2)),
    ],
)
def test_published_layers_scale_with_the_decoder(published: tuple[int, int], depth: int, want: range) -> None:
    assert layers_of_32(*published, depth, 1) == tuple(want)


@pytest.mark.parametrize(
    ("cls", "depth", "want"),
    [
        (VAF, 40, range(9, 15)),  # of LLaVA-1.5-13B
        (SADT, 40, range(20, 28)),
        (VISTA, 40, range(26, 32)),
        (MemVR, 40, range(7, 17)),
        (DeCo, 28, range(18, 25)),  # 20 to 28 do not fit
        (MiddleLayers, 80, range(5, 19)),
    ],
)
def test_released_programs_keep_their_layers(cls: type[Method], depth: int, want: range) -> None:
    published = {VAF: (9, 14), SADT: (20, 27), VISTA: (26, 32), MemVR: (7, 16), DeCo: (20, 28), MiddleLayers: (5, 18)}[
        cls
    ]
    assert layers_of(cls.official(), *published, depth) == tuple(want)
    assert layers_of(cls(), *published, depth) == layers_of_32(*published, depth)
    assert layers_of(cls(layers=[3, 1]), *published, depth) == (1, 3)


def test_pai_guidance() -> None:
    close(pai.guide(t(*CLEAN), t(*OTHER), 1.1, 0.1), [-0.463132, -1.313132, -2.243132, INF])
    close(pai.guide(t(*CLEAN), t(*OTHER), 1.0, 0.1), t(*CLEAN).log_softmax(-1).tolist())


def test_ritual() -> None:
    close(ritual.combine(t(*CLEAN), t(*OTHER), 3.0, 0.1), [21.5, 13.0, 13.7, INF])


def test_sid_keeps_the_least_attended() -> None:
    attention = torch.tensor([[0.5, 0.1, 0.3, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4, 0.0]])
    image = torch.tensor([[True, True, True, True, False], [False, True, True, False, False]])
    kept = sid.least_attended(attention, image, torch.tensor([2, 1]))
    assert kept.tolist() == [[False, True, False, True, False], [False, True, False, False, False]]


def test_sid_budgets() -> None:
    tokens = torch.tensor([576, 300])
    assert sid.budget(None, tokens, "llava").tolist() == [100, 52]
    assert sid.budget(None, tokens, "qwen2_5_vl").tolist() == [58, 30]
    assert sid.budget(50, tokens, "llava").tolist() == [50, 50]
    assert sid.budget(1.0, tokens, "llava").tolist() == [576, 300]


def test_avisc_finds_the_over_attended() -> None:
    # layer 0 looks at the image most (0.8 of 1.0 in total), so it alone decides at gamma 0.5
    attention = torch.tensor([[0.1, 0.1, 0.1, 0.5], [0.2, 0.0, 0.0, 0.0]])
    assert avisc.blind_tokens(attention, 0.5, 1.0).tolist() == [False, False, False, True]
    # with both layers: [0.15, 0.05, 0.05, 0.25], mean 0.125, std 0.0957
    assert avisc.blind_tokens(attention, 0.9, 0.2).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("spec", "depth", "tied", "want"),
    [
        ("low", 32, False, (0, 2, 4, 6, 8, 10, 12, 14)),
        ("high", 32, False, (16, 18, 20, 22, 24, 26, 28, 30)),
        ("high", 60, False, tuple(range(40, 60, 2))),
        ("low", 36, True, tuple(range(2, 18, 2))),
        ("low", 2, True, (1,)),
        ("low", 1, False, (0,)),
        ((5, 1, 6), 6, False, (1, 5)),
    ],
)
def test_dola_candidate_layers(spec: str | tuple[int, ...], depth: int, tied: bool, want: tuple[int, ...]) -> None:
    assert dola.candidate_layers(spec, depth, tied) == want


VECTORS = st.lists(st.floats(-8, 8, width=32), min_size=5, max_size=5)


@given(VECTORS, st.floats(1e-3, 1.0))
def test_cut_keeps_the_favorite_and_drops_by_probability(values: list[float], beta: float) -> None:
    logits = t(*values)
    kept = cut(logits, logits, beta).isfinite()
    p = logits.softmax(-1)
    assert bool(kept[logits.argmax()])
    assert bool((p[kept] >= beta * p.max() * (1 - 1e-9)).all())
    assert bool((p[~kept] < beta * p.max() * (1 + 1e-9)).all())


def test_avisc_takes_a_row_with_nan_for_the_clean_logits() -> None:
    """The released program replaces the whole row, not the entry."""
    rows = torch.stack([t(math.nan, 3.0, 3.5, 0.0), t(*OTHER)])
    clean = t(*CLEAN).expand(2, -1)
    found = contrast(clean, avisc.without_nan(rows, clean), 1.0, 0.1)
    close(found[0], contrast(t(*CLEAN), t(*CLEAN), 1.0, 0.1).tolist())
    close(found[1], contrast(t(*CLEAN), t(*OTHER), 1.0, 0.1).tolist())


def test_pai_amplifies_the_image_only_and_leaves_hidden_columns_hidden() -> None:
    scores, image = t(1, -2, INF, -3)[None, None, None], torch.tensor([[True, True, True, False]])
    close(pai.amplify(scores, image, 0.5)[0, 0, 0], [1.5, -1.0, INF, -3.0])


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=12), st.sampled_from([0.5, 0.75, 0.8, 0.9]))
def test_deco_takes_the_first_that_reach_the_mass(values: list[int], top_p: float) -> None:
    logits = torch.tensor(values, dtype=torch.float32) / 2
    ranked = logits.softmax(-1).topk(len(values))
    reached = int((ranked.values.cumsum(-1) < top_p).sum())  # the first place whose cumulated mass is at least top_p
    got = deco.candidates(logits, top_p, len(values))
    assert sorted(got.nonzero().flatten().tolist()) == sorted(ranked.indices[: reached + 1].tolist())


@pytest.mark.parametrize("noise", [0.03, 0.01])
def test_dola_tells_layers_apart_that_are_close_to_the_final_one(noise: float) -> None:
    missed = 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        final = torch.randn(1, 32000, generator=generator) * 2
        early = final[:, None] + noise * torch.randn(1, 6, 32000, generator=generator)
        exact = dola.divergences(final.double(), early.double()).argmax()
        missed += int(dola.divergences(final, early).argmax() != exact)
    assert missed <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dola_in_the_models_precision(dtype: torch.dtype) -> None:
    """Early logits stay in the head's dtype, so both of their softmaxes are rounded."""
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(3, 200, generator=generator) * 3
    early = (torch.randn(3, 4, 200, generator=generator) * 3).to(dtype)
    p, log_p = final.softmax(-1)[:, None], final.log_softmax(-1)[:, None]
    q, log_q = early.softmax(-1), early.log_softmax(-1)
    assert q.dtype == log_q.dtype == dtype
    m = 0.5 * (p + q)
    kl = torch.nn.functional.kl_div
    want = 0.5 * (kl(log_p.expand_as(m), m, reduction="none").mean(-1) + kl(log_q, m, reduction="none").mean(-1))
    torch.testing.assert_close(dola.divergences(final, early), want, atol=1e-7, rtol=1e-4)
    assert dola.contrast_layers(final, early[:, 0], 0.1).dtype == torch.float32
