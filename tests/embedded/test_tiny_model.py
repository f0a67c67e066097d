"""The embedded model: plain loading, its size, and what its vision tokens predict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

import revisit.embedded
from revisit import RevisitError, generate, load
from revisit.embedded.catalog import CATEGORIES
from revisit.embedded.scenes import render, scene
from revisit.models.outputs import generated_text
from revisit.models.prompts import prepare
from training.card import Plan, chosen, lens, presence, repetition_rate, report

PROMPT = "Please describe this image in detail."

# A program that uses only transformers.
PLAIN = """
import sys
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
folder, image = sys.argv[1:]
model = AutoModelForImageTextToText.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Please describe this image in detail."}]}]
text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
inputs = processor(text=text, images=Image.open(image), return_tensors="pt", add_special_tokens=False)
made = model.generate(**inputs, max_new_tokens=60)
assert "revisit" not in sys.modules
print(model.dtype, "|", processor.decode(made[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""


@pytest.fixture(scope="module")
def tiny() -> tuple[object, object]:
    return load("tiny")


def test_an_answer_contains_no_further_question(tiny) -> None:  # type: ignore[no-untyped-def]
    """This noise makes the model repeat one noun; tokens that occur only in prompts end the answer."""
    model, processor = tiny
    dice = np.random.default_rng(1)
    dice.integers(0, 256, (128 * 128 + 240 * 320) * 3, dtype=np.uint8)
    noise = Image.fromarray(dice.integers(0, 256, (480, 640, 3), dtype=np.uint8))
    inputs = prepare(processor, [PROMPT], [[noise]])
    (text,) = generated_text(processor, generate(model, **inputs, method="revisit", max_new_tokens=96), inputs)
    assert "?" not in text
    assert "\n" not in text


def test_a_program_without_revisit_gives_the_same_caption(tiny, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, processor = tiny
    image = render(scene("usual", 21, 0))
    image.save(tmp_path / "scene.png")
    run = subprocess.run(
        [sys.executable, "-c", PLAIN, str(revisit.embedded.path()), str(tmp_path / "scene.png")],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    dtype, plain = run.stdout.strip().split(" | ")
    inputs = prepare(processor, [PROMPT], [[image]])
    (ours,) = generated_text(
        processor, generate(model, **inputs, method="greedy", max_new_tokens=60, do_sample=False), inputs
    )
    assert dtype == "torch.float32"
    assert plain == ours
    assert ours.endswith(".")


def test_the_file_is_half_precision_and_small() -> None:
    path = revisit.embedded.path() / "model.safetensors"
    assert path.stat().st_size < 20_000_000
    with safe_open(path, "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert kinds <= {"F16", "I64"}
    config = json.loads((path.parent / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["text_config"]["head_dim"] in (32, 64)


def test_every_noun_is_one_token(tiny) -> None:  # type: ignore[no-untyped-def]
    tokenizer = tiny[1].tokenizer
    for category in CATEGORIES:
        assert len(tokenizer.encode(" " + category.noun)) == len(tokenizer.encode(" " + category.plural)) == 1
    odd = "Grüße, 世界! <tag> \t42"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd


def test_vision_tokens_name_their_patches(tiny) -> None:  # type: ignore[no-untyped-def]
    rows = lens(*tiny, [scene("usual", 22, i) for i in range(12)], 12)
    assert len(rows) == tiny[0].config.text_config.num_hidden_layers + 1
    last = rows[-1]
    assert last.tokens == 12 * 64
    assert last.objects > 0.5
    assert last.objects > 2 * last.full
    assert last.objects_low < last.objects < last.objects_high


def test_presence_is_mostly_right(tiny) -> None:  # type: ignore[no-untyped-def]
    scores = presence(*tiny, [scene("usual", 23, i) for i in range(24)], None, Plan(batch=24))
    assert scores.metrics["accuracy"] >= 0.75


def test_the_card_reports_the_chosen_settings(tmp_path: Path) -> None:
    plan = Plan(usual=2, validation=2, test=2, batch=2, new_tokens=24, layers=("last",), alphas=(0.1,))
    text = report("tiny", plan, tmp_path)
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["chosen"]["alpha"] == 0.1
    assert [row["decoding"] for row in stored["test"]][2:] == [
        f"ReVisiT last, alpha 0.1, {s}" for s in ("random", "max")
    ]
    assert text == (tmp_path / "report.md").read_text()


def test_settings_are_chosen_by_hallucination_at_equal_f1() -> None:
    from revisit.eval.benchmarks.base import Scores
    from revisit.methods.revisit import ReVisiT

    def made(chair_i: float, f1: float) -> Scores:
        return Scores({"CHAIRi": chair_i, "F1": f1}, {}, {}, ())

    first, second, third = (ReVisiT(alpha=a) for a in (0.1, 0.01, 0.001))
    tried = [(first, made(0.10, 0.80)), (second, made(0.05, 0.70)), (third, made(0.08, 0.81))]
    assert chosen(made(0.12, 0.79), tried, {}) == third
    assert chosen(made(0.12, 0.90), tried, {}) == third  # none keeps F1: the best F1
    babble = (ReVisiT(alpha=1e-5), made(0.01, 0.95))
    repeated = repetition_rate(["A cat. A cat. A cat.", "A cat and a dog. The cat is near.", "Nothing."])
    assert repeated == pytest.approx(1 / 3)
    assert chosen(made(0.12, 0.79), [*tried, babble], {babble[0]: repeated}) == third


def test_looking_ahead_beyond_a_static_cache_raises(tiny: tuple[object, object]) -> None:
    """SADT looks ahead at the beginning of a word, which random models do not write."""
    model, processor = tiny
    inputs = prepare(processor, PROMPT, render(scene("unusual", 3, 1)))
    with pytest.raises(RevisitError, match="leave out cache_implementation"):
        generate(model, **inputs, method="sadt", max_new_tokens=8, cache_implementation="static")
