"""How states become logits: by gathered rows or the whole vocabulary, whichever moves less, and by heads that cannot be indexed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.models.parts import Head, LinearHead


class Wrapped(nn.Module):
    """A head whose weight cannot be indexed, as quantized and off-loaded ones are; it counts its calls."""

    def __init__(self, inner: nn.Linear, width: int | None) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0
        if width is not None:
            self.in_features = width

    def forward(self, states: Tensor) -> Tensor:
        self.calls += 1
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
def test_rows_of_a_head_that_cannot_be_indexed_are_fetched_once(bias: bool) -> None:
    inner = nn.Linear(8, 50, bias=bias)
    module = Wrapped(inner, 8)
    head, plain = Head(module), LinearHead(inner.weight, inner.bias)
    states, ids = torch.randn(3, 8), torch.tensor([4, 1, 49])
    with torch.no_grad():
        torch.testing.assert_close(head.logits(states, ids), plain.logits(states, ids))
        calls = module.calls
        for _ in range(5):
            head.logits(states, ids)
    assert module.calls == calls == 2  # the bias, and all columns at once


def test_a_head_that_hides_its_width_is_refused_in_one_sentence() -> None:
    with pytest.raises(RevisitError, match="The LM head is a Wrapped whose rows cannot be read") as refused:
        Head(Wrapped(nn.Linear(8, 50), None)).logits(torch.randn(3, 8), torch.tensor([1]))
    assert str(refused.value).count(". ") == 0
