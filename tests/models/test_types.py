"""Every type that transformers maps to image-text-to-text is decoded with a tiny model, or an error gives the reason."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as MAPPED

import families
import model_types
import revisit
from model_types import DECODED, UNSUPPORTED
from revisit import ReVisiT, RevisitError, Trace
from revisit.models import families as table
from revisit.models.parts import unsupported, vision_token_ids
from revisit.models.patch_maps import merged

METHOD = ReVisiT(alpha=1e-2)
# Models with several residual streams between their layers: only the last layer has one state per token.
SEVERAL_STREAMS = ("gemma3n", "glm5_next", "inkling2", "qwen4_exp")
NO_BEAMS = ("fuyu", "llama4")  # transformers itself does not repeat the image's features for the beams


def known(model_type: str) -> str:
    """Return the type; skip the test unless this version of transformers has it and its packages are installed."""
    if model_type not in MAPPED:
        pytest.skip("this version of transformers does not have it")
    tiny = DECODED.get(model_type)
    if tiny and Version(transformers.__version__) < Version(tiny.since):
        pytest.skip(f"its configuration is that of transformers {tiny.since}")
    needs = tiny.needs if tiny else ""
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; make test-torchvision has it")
    return model_type


def test_every_mapped_type_is_accounted_for() -> None:
    decoded, rejected = {*families.ALL, *DECODED}, set(UNSUPPORTED)
    assert not decoded & rejected
    missing = sorted(set(MAPPED) - decoded - rejected)
    assert not missing, f"transformers maps {missing}: add a tiny configuration to tests/model_types.yaml"


class KeepStates(ReVisiT):
    """ReVisiT that stores the final vision states of the first item in `kept`."""

    def begin(self, prompt: Any, passes: Any) -> Any:
        refine = super().begin(prompt, passes)
        capture = passes.capture((prompt.parts.depth,))

        def keep(input_ids: Any, logits: Any) -> Any:
            kept["states"] = capture.items[0].by_layer[prompt.parts.depth]
            return refine(input_ids, logits)

        return keep


kept: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize("model_type", DECODED)
def test_a_tiny_model_is_decoded_by_its_vision_states(model_type: str) -> None:
    model, inputs = model_types.build(known(model_type))
    options: dict[str, Any] = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    trace, layers = Trace(), "last" if model_type in SEVERAL_STREAMS else "all"
    revisit.generate(model, **inputs, method=KeepStates(alpha=1e-2, layers=layers), trace=trace, **options)
    assert trace.rows[0].vision_tokens == DECODED[model_type].tokens
    assert trace.rows[0].applied > 0
    plain = model.generate(**inputs, output_hidden_states=True, return_dict_in_generate=True, **options)
    positions = inputs["input_ids"][0] == model_types.IMAGE
    final = plain.hidden_states[0][-1]
    if final.ndim > 3:  # all streams of the last layer, which the decoder then joins
        final = model.base_model(**inputs).last_hidden_state
    torch.testing.assert_close(kept["states"], final[0, positions], atol=1e-5, rtol=1e-5)
    if model_type not in NO_BEAMS:
        beams = revisit.generate(model, **inputs, method=METHOD, num_beams=2, **options)
        assert beams.shape == plain.sequences.shape


@pytest.mark.parametrize("model_type", [name for name, tiny in DECODED.items() if tiny.real])
def test_a_tiny_model_is_decoded_with_its_real_processor(model_type: str) -> None:
    needs = table.of(known(model_type)).needs
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; make test-torchvision has it")
    model, inputs = model_types.build_with_processor(model_type)
    trace, options = Trace(), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    both = revisit.generate(model, **inputs, method=METHOD, trace=trace, **options)
    vision = torch.isin(inputs["input_ids"], torch.tensor(vision_token_ids(model.config)))
    assert [row.vision_tokens for row in trace.rows] == vision.sum(-1).tolist()
    assert all(row.vision_tokens > 9 and row.applied for row in trace.rows)
    assert not torch.equal(both, revisit.generate(model, **inputs, method="greedy", **options))


@pytest.mark.parametrize("model_type", SEVERAL_STREAMS)
@pytest.mark.parametrize("method", [ReVisiT(layers="all"), revisit.DoLa(layers=(1,))], ids=["revisit", "dola"])
def test_early_layers_of_several_streams_raise(model_type: str, method: Any) -> None:
    model, inputs = model_types.build(known(model_type))
    with pytest.raises(RevisitError, match="several states"):
        revisit.generate(model, **inputs, method=method, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("model_type", ["dots3_note", "lfm3_vl"])
def test_a_vision_token_depends_most_on_its_own_patches(model_type: str) -> None:
    """Their processors pack pixels as Qwen2-VL's does, so each group of four patches becomes one token."""
    model, inputs = model_types.build(known(model_type))
    assert table.of(model_type).patch_map is merged

    def features(pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = model.model.get_image_features(pixels, inputs["image_grid_thw"], return_dict=True)
        return torch.cat(found.pooler_output)  # (tokens, d)

    plain = features(inputs["pixel_values"])
    for token in range(4):
        changed = inputs["pixel_values"].clone()
        changed[4 * token : 4 * token + 4] *= -1
        assert int((features(changed) - plain).norm(dim=-1).argmax()) == token


@pytest.mark.parametrize("model_type", ["inkling_mm_model", "inkling2"])
@pytest.mark.parametrize("name", ["avisc", "vaf"])
def test_attention_with_further_terms_raises(model_type: str, name: str) -> None:
    model, inputs = model_types.build(known(model_type))
    with pytest.raises(RevisitError, match="position_bias"):
        revisit.generate(model, **inputs, method=name, max_new_tokens=2, do_sample=False)


def test_early_exits_of_a_padded_head_have_the_size_of_the_logits() -> None:
    model, inputs = model_types.build(known("inkling2"))
    seen = Trace()
    revisit.generate(model, **inputs, method=revisit.DoLa(layers=(0,)), trace=seen, max_new_tokens=2, do_sample=False)
    assert seen.rows[0].applied > 0


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_types_state_the_reason(model_type: str) -> None:
    settings, reason = UNSUPPORTED[known(model_type)]
    config = CONFIG_MAPPING[model_type](**settings)
    message = unsupported(config, "This model")
    assert message is not None
    assert message.startswith("This model ")
    assert reason in message
    assert message.count(". ") == 0  # one sentence
    if table.of(model_type).unsupported:  # such types have a generate() of their own, which would not call the method
        fake = SimpleNamespace(config=config, generate=lambda **_: pytest.fail("it was decoded"))
        with pytest.raises(RevisitError, match=reason):
            revisit.generate(fake, input_ids=torch.tensor([[1]]), method=METHOD)
