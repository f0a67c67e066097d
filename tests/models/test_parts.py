"""The LM head, projected by gathered rows, the whole vocabulary or unit states; and the context length."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.models.head import LinearHead, calibrated, rows_of
from revisit.models.parts import context_length


class Wrapped(nn.Module):
    """A head whose weight cannot be indexed, like a quantized or off-loaded one; counts calls for several states."""

    def __init__(self, inner: nn.Linear, width: int | None) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0
        if width is not None:
            self.in_features = width

    def forward(self, states: Tensor) -> Tensor:
        self.calls += len(states) > 1
        return self.inner(states)  # type: ignore[no-any-return]


def test_gathered_rows_and_the_whole_vocabulary_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    head = LinearHead(torch.randn(50, 8), torch.randn(50))
    states, ids = torch.randn(2, 3, 8), torch.stack([torch.randperm(50)[:20] for _ in range(2)])
    assert not head.gathers(states, ids)  # few states, many candidates
    assert head.gathers(torch.randn(2, 3000, 8), ids)
    whole = head.logits(states, ids)
    monkeypatch.setattr(LinearHead, "gathers", lambda *_: True)
    torch.testing.assert_close(head.logits(states, ids), whole)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_head_that_cannot_be_indexed_are_computed_once_for_its_weights(bias: bool) -> None:
    """Every call of generate calibrates a head of its own; their rows are shared until the weights change."""
    inner = nn.Linear(8, 50, bias=bias)
    module = Wrapped(inner, 8)
    states, ids = torch.randn(3, 8), torch.tensor([4, 1, 49])
    for repeat in (1, 2):
        with torch.no_grad():
            inner.weight.mul_(repeat)
            plain = LinearHead(inner.weight, inner.bias)
            module.calls = 0
            for _ in range(5):
                head = calibrated(module, None, states[0], inner(states[0]), "a test model")
                torch.testing.assert_close(head.logits(states, ids), plain.logits(states, ids))
        assert module.calls == 1  # all columns at once


def test_a_head_without_a_declared_width_raises() -> None:
    with pytest.raises(RevisitError, match="Wrapped"):
        rows_of(Wrapped(nn.Linear(8, 50), None))


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 64),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 64),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, None),  # the declared length is exceeded
    ],
)
def test_only_a_scaling_factor_lifts_the_context_length(rope: dict[str, object], length: int | None) -> None:
    text = transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
    assert context_length(transformers.LlavaConfig(text_config=text)) == length
    per_type = transformers.LlamaConfig(max_position_embeddings=64)
    per_type.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert context_length(per_type) == length
