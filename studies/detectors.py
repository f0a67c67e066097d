"""Detectors of wrong words.

Each is a function from a `Reading`, the model's computations for a word, to a score, which is higher for words that the image supports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from revisit.explain.sweep import Flags, Floats

GLSIM_PATCHES = 32 / 576  # share of the vision tokens that GLSim compares
COSINE_PATCHES = 0.05
FOREGROUND = 0.1  # share of the vision tokens
BLOB = 3  # fewest patches of a foreground region


@dataclass(frozen=True)
class Reading:
    """A model's computations for one word of a text. Hidden state 0 is the input of the first layer, the last one is normed."""

    log_p: Tensor  # (V,) log-probabilities where the word begins
    tokens: tuple[int, ...]  # of the word
    chances: Tensor  # (tokens, states, vision tokens): their probabilities, each vision token read through the LM head
    patches: Tensor  # (states, vision tokens, d)
    prompt: Tensor  # (states, d) at the end of the prompt
    state: Tensor  # (states, d) at the position that predicts the word
    attention: Tensor  # (layers, vision tokens) of that position, mean over heads
    agreement: float  # share of the vision tokens with the most attention in late layers whose likeliest word agrees
    support: float  # by `revisit.check`


def probability(reading: Reading) -> float:
    """Return the model's log-probability of the word's first token."""
    return float(reading.log_p[reading.tokens[0]])


def entropy(reading: Reading) -> float:
    """Return the negative entropy of the model's distribution where the word begins."""
    return float((reading.log_p.exp() * reading.log_p).nansum())


def sadt(reading: Reading) -> float:
    """Return the share of attended vision tokens that predict the word (SADT's test, as a score)."""
    return reading.agreement


def glsim(reading: Reading) -> float:
    """Return GLSim (arXiv:2508.19972) as released: 0.6 · global + 0.4 · local similarity.

    Global compares the end of the prompt with the word. Local compares the word with the vision tokens of the last layer that predict its
    first token most. The released program indexes both by (text layer 31, image layer 32), so that the global term takes the prompt one
    layer below the word, and the local term takes the word one layer below the image.
    """
    count = max(1, round(reading.patches.shape[1] * GLSIM_PATCHES))
    best = reading.patches[-1][reading.chances[0, -1].topk(count).indices]
    local = _cosine(best, reading.state[-2]).mean()
    return 0.6 * float(_cosine(reading.prompt[-2], reading.state[-1])) + 0.4 * float(local)


def internal_confidence(reading: Reading) -> float:
    """Return the largest probability of any token of the word, over hidden states and vision tokens (Jiang et al., ICLR 2025)."""
    return float(reading.chances.max())


def patch_cosine(reading: Reading) -> float:
    """Return the cosine to the most similar 5 % of the vision tokens, mean of the middle layers (CGC of arXiv:2604.04863)."""
    similar = _cosine(reading.patches, reading.state[:, None])[1:]  # (layers, vision tokens)
    count = max(1, round(similar.shape[1] * COSINE_PATCHES))
    return float(_middle(similar.topk(count).values.mean(-1)))


def dispersion(reading: Reading) -> float:
    """Return the negative attention dispersion, mean of the middle layers (ADS of arXiv:2604.04863).

    In each layer the tenth of the vision tokens with the most attention is foreground; its regions of at least three patches are focus.
    Dispersion is the attention outside the focus, times the entropy of the background relative to log(vision tokens).
    """
    return -float(_middle(torch.tensor([_dispersed(layer) for layer in reading.attention.float()])))


def _dispersed(attention: Tensor) -> float:
    from scipy.ndimage import label

    count = len(attention)
    rows = next(n for n in range(int(count**0.5), 0, -1) if count % n == 0)  # the most nearly square grid
    share = attention - attention.min()
    if not float(share.sum()) > 0:
        return 1.0
    share = share / share.sum()
    front = torch.zeros(count, dtype=torch.bool)
    front[share.topk(max(1, round(count * FOREGROUND))).indices.cpu()] = True
    regions, found = label(front.view(rows, -1).numpy(), np.ones((3, 3)))
    sizes = np.bincount(regions.ravel(), minlength=found + 1)
    sizes[0] = 0
    focus = share.cpu()[torch.from_numpy((sizes >= BLOB)[regions].ravel())].sum()
    behind = share.cpu()[~front]
    if not float(behind.sum()) > 0:
        return 0.0
    behind = behind / behind.sum()
    spread = -torch.special.xlogy(behind, behind).sum() / torch.tensor(float(count)).log()
    return float((1 - focus) * spread)


def ours(reading: Reading) -> float:
    """Return the support of `revisit.check`: the mean of the largest probabilities at the layer that the model recommends."""
    return reading.support


def average_precision(scores: Floats, right: Flags) -> float:
    """Return the average precision of finding wrong words, lowest score first; among equal scores, right words come first."""
    wrong = ~right[np.lexsort((~right, scores))]
    precision = np.cumsum(wrong) / np.arange(1, len(wrong) + 1)
    return float(precision[wrong].mean()) if wrong.any() else float("nan")


def _middle(layers: Tensor) -> Tensor:
    """Return the mean of the middle half of the layers, of all layers if there are too few."""
    half = layers[len(layers) // 4 : len(layers) * 3 // 4]
    return half.mean() if len(half) else layers.mean()


def _cosine(states: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(states.float(), other.float(), dim=-1)


PROBABILITY, CHECK = "model's probability", "revisit.check"
DETECTORS: dict[str, Callable[[Reading], float]] = {
    PROBABILITY: probability,
    "model's entropy, negative": entropy,
    "attended tokens (SADT)": sadt,
    "GLSim": glsim,
    "internal confidence": internal_confidence,
    "patch cosine": patch_cosine,
    "attention dispersion, negative": dispersion,
    CHECK: ours,
}
