"""The lens against the same sums done at once, and its page."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

import families
from revisit import RevisitError
from revisit.explain import lens, lens_page, prefill
from revisit.models.prompts import prepare


@pytest.fixture(scope="module")
def seen() -> lens.Lens:
    model, processor = families.build("llava")
    return lens.read_vision_tokens(
        model, processor, [families.picture(1, (90, 60))], {"words": ["a", "b", "c", "zebra"]}, best=3
    )


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    """Logits of all vision tokens at all layers over the whole vocabulary (layers, tokens, V), by transformers alone."""
    model, processor = families.build("llava")
    inputs = prepare(processor, ["Describe the image."], [[families.picture(1, (90, 60))]])
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
        mask = inputs["input_ids"][0] == model.config.image_token_id
        return torch.stack([model.lm_head(state[0][mask]) for state in hidden])


def test_the_best_of_the_vocabulary(seen: lens.Lens, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices much smaller than the table, the same tokens and probabilities come out."""
    model, processor = families.build("llava")
    monkeypatch.setattr(prefill, "CHUNK_NUMBERS", 2000)
    sliced = lens.read_vision_tokens(model, processor, [families.picture(1, (90, 60))], best=3)
    chance, top = whole.softmax(-1).topk(3, dim=-1)
    for made in (seen.readings[0], sliced.readings[0]):
        assert torch.allclose(made.chance, chance, atol=1e-5)
        from revisit.explain.record import token_text

        said = [[made.entries[n] for n in row] for row in made.top[-1].tolist()]
        assert said == [[token_text(processor.tokenizer, i) for i in row] for row in top[-1].tolist()]
    assert seen.layers == (0, 1, 2, 3, 4)
    assert seen.layout.tokens == 16


def test_shares_within_a_set(seen: lens.Lens, whole: torch.Tensor) -> None:
    tokenizer = families.build("llava")[1].tokenizer
    ids = [tokenizer(w, add_special_tokens=False)["input_ids"] for w in ("a", "b", "c")]
    assert all(len(i) == 1 for i in ids)
    shares = whole[:, :, [i[0] for i in ids]].softmax(-1)
    reading = seen.readings[1]
    assert reading.words == ["a", "b", "c"]
    assert reading.maps is not None
    assert torch.allclose(reading.maps, shares, atol=1e-5)
    assert torch.allclose(reading.chance, shares.topk(3, dim=-1).values, atol=1e-5)
    assert seen.notes == ["words: left out zebra, because the tokenizer has no single token for it."]


def test_norm_changes_the_layers_below_the_last_only(seen: lens.Lens) -> None:
    model, processor = families.build("llava")
    image = families.picture(1, (90, 60))
    normed = lens.read_vision_tokens(model, processor, [image], best=3, norm="final").readings[0].chance
    plain = seen.readings[0].chance
    assert torch.allclose(normed[-1], plain[-1], atol=1e-6)
    assert not torch.allclose(normed[1], plain[1], atol=1e-3)
    with pytest.raises(RevisitError, match="norm must be"):
        lens.read_vision_tokens(model, processor, [image], norm="half")


def test_many_words_keep_the_strongest_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens, "MOST_MAPS", 2)
    model, processor = families.build("llava")
    made = lens.read_vision_tokens(
        model, processor, [families.picture(1, (90, 60))], {"letters": list("abcdef")}
    ).readings[1]
    assert len(made.entries) == 6
    assert len(made.words) == 2
    full_chance, full_top = made.chance[-1], made.top[-1]
    strongest = made.entries[int(full_top.flatten()[int(full_chance.argmax())])]
    assert made.words[0] == strongest


def test_a_set_without_single_tokens_is_refused() -> None:
    model, processor = families.build("llava")
    with pytest.raises(RevisitError, match="at least two words that are single tokens"):
        lens.read_vision_tokens(model, processor, [families.picture(1)], {"words": ["zebra", "horse"]})


def test_the_page_holds_the_readings(seen: lens.Lens) -> None:
    data = lens_page.payload(seen)
    words = data["readings"][1]
    maps = np.frombuffer(base64.b64decode(words["maps"]), "uint8").reshape(5, 16, 3)
    assert seen.readings[1].maps is not None
    assert np.abs(maps / 255 - seen.readings[1].maps.numpy()).max() < 0.003
    top = np.frombuffer(base64.b64decode(words["top"]), "int32").reshape(5, 16, 3)
    assert (top == seen.readings[1].top.numpy()).all()
    assert "LensView" in lens_page.render(seen)
