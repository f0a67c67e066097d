"""DoLa on whole models: the tokens of its last version in transformers, and its early exits against hidden states."""

from __future__ import annotations

import pytest
import torch
from decoding_cases import FAMILIES, batch, decode
from torch import Tensor

import families
import parity_pack
import revisit
from revisit import DeCo, DoLa, Trace
from revisit.methods import deco, dola


def test_every_row_of_the_reference_token_for_token() -> None:
    (model, cases), rows = parity_pack.load(), parity_pack.rows("dola")
    assert len(rows) == 36
    for row in rows:
        layers = row["dola_layers"]
        method = None if layers is None else DoLa(layers=layers if isinstance(layers, str) else tuple(layers))
        trace = Trace()
        output = revisit.generate(
            model,
            **cases[row["case"]],
            method=method or "greedy",
            trace=trace,
            max_new_tokens=len(row["tokens"]),
            do_sample=False,
            repetition_penalty=row["repetition_penalty"],
            eos_token_id=10_000,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert output.sequences[0, cases[row["case"]]["input_ids"].shape[1] :].tolist() == row["tokens"], row
        if method is not None:
            assert trace.rows[0].plausible_tokens == row["kept"]
            for scores, best in zip(output.scores, row["top_scores"], strict=True):
                assert scores[0].topk(len(best)).values.tolist() == pytest.approx(best, abs=2e-3)


def early_logits(family: str, layers: tuple[int, ...], *, normed: bool = False) -> tuple[Tensor, Tensor]:
    """Return the logits of the first step and those of early layers, from all hidden states.  -> (rows, V), (rows, layers, V)"""
    model, _ = families.build(family)
    with torch.no_grad():
        output = model(**batch(family), output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer][:, -1] for layer in layers], dim=1)
        early = model.lm_head(model.model.language_model.norm(states) if normed else states)
    return output.logits[:, -1], early


@pytest.mark.parametrize("family", FAMILIES)
def test_early_exits_are_the_hidden_states_through_the_head(family: str) -> None:
    output, trace = decode(family, batch(family), DoLa(layers=(0, 1, 3), relative_top=0.001))
    logits, early = early_logits(family, (0, 1, 3))
    best = dola.divergences(logits, early).argmax(-1)
    want = torch.stack([dola.contrast_layers(logits[r], early[r, best[r]], 0.001) for r in (0, 1)])
    torch.testing.assert_close(output.scores[0], want, atol=1e-4, rtol=1e-4)
    assert [row.records[0].layer for row in trace.rows] == [(0, 1, 3)[i] for i in best.tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_deco_uses_the_normed_states(family: str) -> None:
    output, _ = decode(family, batch(family), DeCo(layers=(1, 2)))
    want, _ = deco.correct(*early_logits(family, (1, 2), normed=True), 0.6, 0.9, 20)
    torch.testing.assert_close(output.scores[0], want, atol=1e-4, rtol=1e-4)


def test_one_layer_for_the_batch_is_the_published_rule() -> None:
    output, _ = decode("llava", batch("llava"), DoLa.official(layers=(1, 2, 3)))
    logits, early = early_logits("llava", (1, 2, 3))
    best = int(dola.divergences(logits, early).mean(0).argmax())
    torch.testing.assert_close(
        output.scores[0], dola.contrast_layers(logits, early[:, best], 0.1), atol=1e-4, rtol=1e-4
    )


def test_missing_layers_raise() -> None:
    for method in (DoLa(layers=(9,)), DeCo(layers=(9,))):
        with pytest.raises(revisit.RevisitError, match="numbered 0"):
            decode("llava", batch("llava"), method)


def test_tokens_of_probability_zero_are_not_compared() -> None:
    final, early = torch.tensor([[2.0, 1.0, -torch.inf]]), torch.tensor([[[0.5, 1.0, 7.0], [0.0, 3.0, -2.0]]])
    want = dola.divergences(final[:, :2], early[..., :2]) * 2 / 3  # a mean over three tokens instead of two
    torch.testing.assert_close(dola.divergences(final, early), want)


def test_packed_head_gives_the_heads_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from revisit.forward import early_exits as early

    want, _ = decode("llava", batch("llava"), DoLa())
    monkeypatch.setattr(early, "PACK_FROM", 1)
    model, _ = families.build("llava")
    if not early.packs(model.lm_head):
        pytest.skip("torch was built without oneDNN")
    got, _ = decode("llava", batch("llava"), DoLa())
    assert torch.equal(got.sequences, want.sequences)
    for mine, other in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    rows = torch.randn(3, model.lm_head.in_features)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # a changed weight is packed again
        torch.testing.assert_close(early.packed_product(model.lm_head, rows), model.lm_head(rows))
        model.lm_head.weight.mul_(0.5)
    early._PACKED.pop(model.lm_head)
