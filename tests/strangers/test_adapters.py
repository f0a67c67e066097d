"""Models with adapters of peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import revisit
from revisit.decoding.method import METHODS

peft = pytest.importorskip("peft")

LAYERS = r".*language_model.*(q_proj|v_proj|down_proj)"
NAMES = [name for name in METHODS.built_in if name not in ("chain", "tcd")]  # TCD is for videos


def adapter(targets: Any = LAYERS, **settings: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False, **settings)


def adapted(model: Any, *names: str, targets: Any = LAYERS) -> Any:
    """Add random adapters, of which the first one is active."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # no longer tied to the embedding
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, adapter(targets), adapter_name=names[0])
    for name in names[1:]:
        wrapped.add_adapter(name, adapter(targets))
    return wrapped.eval()


@pytest.mark.parametrize("targets", [LAYERS, ["lm_head"], r".*vision_tower.*q_proj"])
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_gives_the_answers_of_the_merged_model(fresh: Any, answer: Any, name: str, targets: Any) -> None:
    model, processor = fresh
    wrapped = adapted(model, "a", targets=targets)
    merged = copy.deepcopy(wrapped).merge_and_unload()
    assert answer((wrapped, processor), name) == answer((merged, processor), name)


@pytest.mark.parametrize("mixed", [False, True], ids=["both active", "mixed into a third"])
def test_two_adapters_give_the_answers_of_the_merged_model(fresh: Any, answer: Any, mixed: bool) -> None:
    model, processor = fresh
    wrapped = adapted(model, "a", "b")
    if mixed:
        wrapped.add_weighted_adapter(["a", "b"], [0.7, 0.3], "c", combination_type="linear")
    wrapped.base_model.set_adapter("c" if mixed else ["a", "b"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    for name in ("revisit", "vcd", "dola", "sadt"):
        assert answer((wrapped, processor), name) == answer((merged, processor), name)


def test_a_saved_adapter_is_loaded_around_its_base_model(fresh: Any, answer: Any, tmp_path: Any) -> None:
    model, processor = fresh
    wrapped = adapted(model, "a")
    wrapped.save_pretrained(tmp_path)
    again, _ = revisit.load("tiny")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "a").eval()
    assert answer((loaded, processor), "revisit") == answer((wrapped, processor), "revisit")
    with pytest.raises(revisit.RevisitError, match="holds an adapter"):
        revisit.load(tmp_path / "a")


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_each_row_has_its_own_adapter(fresh: Any, images: Any, answer: Any, name: str, beams: int) -> None:
    model, processor = fresh
    wrapped = adapted(model, "a", "b")
    rows = answer((wrapped, processor), name, images[:1] * 3, adapter_names=["b", "a", "b"], num_beams=beams)
    alone = {}
    for active in ("a", "b"):
        wrapped.set_adapter(active)
        (alone[active],) = answer((wrapped, processor), name, images[:1], num_beams=beams)
    assert rows == [alone["b"], alone["a"], alone["b"]]
    assert alone["a"] != alone["b"]


@pytest.mark.parametrize("name", ["revisit", "code", "dola"])
@pytest.mark.parametrize("targets", [LAYERS, ["lm_head"]])
def test_a_switched_adapter_leaves_nothing_behind(fresh: Any, answer: Any, name: str, targets: Any) -> None:
    model, processor = fresh
    pair = adapted(model, "a", "b", targets=targets), processor

    def all_answers() -> list[Any]:
        answers = []
        for active in ("a", "b"):
            pair[0].set_adapter(active)
            answers.append(answer(pair, name))
        with pair[0].disable_adapter():
            return [*answers, answer(pair, name)]

    got = all_answers()
    assert got == [answer(alone(active, targets), name) for active in ("a", "b", None)]
    assert got[0] != got[1] != got[2]


def alone(active: str | None, targets: Any) -> tuple[Any, Any]:
    """Return a fresh model with one of two adapters, or none, which has answered nothing yet."""
    model, processor = revisit.load("tiny")
    wrapped = adapted(model, "a", "b", targets=targets)
    if active is None:
        return wrapped.unload(), processor
    wrapped.set_adapter(active)
    return wrapped, processor


def test_the_comparison_of_the_guide(fresh: Any, images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, with `tiny` in place of the checkpoint."""
    monkeypatch.chdir(tmp_path)
    adapted(fresh[0], "default").save_pretrained("ADAPTER")
    for number in range(20):
        images[number % 2].save(f"{number}.png")
    rows = [f"{number}.png,Is there a {noun} in the image?,yes" for number, noun in enumerate(["cat", "dog"] * 10)]
    Path("questions.csv").write_text("image,question,label\n" + "\n".join(rows))
    guide = (Path(__file__).parents[2] / "docs/works-with.md").read_text("utf-8")
    names: dict[str, Any] = {}
    exec(guide.split("```python\n")[1].split("```")[0].replace("llava-hf/llava-1.5-7b-hf", "tiny"), names)
    accuracies = [log[-1].scores.metrics["accuracy"] for log in (names["off"], names["on"])]
    assert names["effect"].difference == pytest.approx(accuracies[1] - accuracies[0])
    assert names["effect"].units == 20


def test_ask_check_and_lens_take_a_wrapped_model(fresh: Any, images: Any) -> None:
    model, processor = fresh
    wrapped = adapted(model, "a")
    merged = copy.deepcopy(wrapped).merge_and_unload()
    text = "A suitcase at an airport."

    def found(model: Any) -> list[Any]:
        asked = [str(a) for a in revisit.ask_many((model, processor), images, max_new_tokens=16)]
        supports = [round(word.support, 4) for word in revisit.check((model, processor), images[0], text).words]
        return [asked, supports, repr(revisit.lens((model, processor), images[0]))]

    assert found(wrapped) == found(merged) == found(torch.compile(wrapped, backend="eager"))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_raise_before_the_first_token(fresh: Any, answer: Any, kind: str, images: Any) -> None:
    model, processor = fresh
    wrapped = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    pair = wrapped, processor
    assert answer(pair, "greedy")
    for name in ("revisit", "vcd", "opera"):
        with pytest.raises(revisit.RevisitError, match="4 virtual tokens"):
            answer(pair, name)
    with pytest.raises(revisit.RevisitError, match="4 virtual tokens"):
        revisit.check(pair, images[0], "A dog.")


@pytest.mark.parametrize("change", ["disabled", "other", "scaled", "merged", "hooked"])
def test_stored_answers_belong_to_the_state_of_the_adapters(fresh: Any, change: str) -> None:
    from revisit.models.identity import loaded_fingerprint

    model, processor = fresh
    wrapped = adapted(model, "a", "b")
    before = loaded_fingerprint(wrapped, processor)
    assert loaded_fingerprint(wrapped, processor) == before
    if change == "disabled":
        with wrapped.disable_adapter():
            assert loaded_fingerprint(wrapped, processor) != before
        assert loaded_fingerprint(wrapped, processor) == before
        return
    if change == "other":
        wrapped.set_adapter("b")
    elif change == "scaled":
        for module in wrapped.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("a", 0.5)
    elif change == "merged":
        wrapped.merge_adapter()
    else:
        model.model.language_model.layers[0].register_forward_hook(lambda module, args, output: output)
    assert loaded_fingerprint(wrapped, processor) != before
