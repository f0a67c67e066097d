"""The recipe of the embedded model, in the stages of a real vision-language model.

vision     the tower learns to name what is in each patch (word and tint), with two throw-away linear heads.
language   the language model learns captions and questions as plain text and after scenes *written as words in the
           image slots*, one word per patch, a tint's word added to its object's. Every position is predicted, the slots
           too, so that any position's hidden state can be read through the head.
projector  only the projector learns: its outputs approach the embeddings of the patch words, and the frozen language
           model must be able to describe the image. Patches become words.
tune       projector and language model together on images; the slots are still predicted.

Captions and lists are trained with unlikelihood against naming an object twice.

`vision` and `language` are independent and may run side by side. Each stage writes `<stage>.safetensors`
(weights and optimizer) with `<stage>.json` (step and settings), replaces them atomically, and resumes from them after a
kill; batches depend only on the seed and the step, so a resumed run ends in the same state as an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from revisit.embedded.catalog import COLORS
from revisit.embedded.dice import Dice
from revisit.errors import unknown
from training.fitting import Checkpoint, Loss, Stage, fit, ordered_log
from training.texts import PATCH_WORDS
from training.tiny.data import Batch, Images, Mixture, Writer, corpus, prepare
from training.tiny.model import Shape, make_model, make_processor, save, train_tokenizer

STAGES = ("vision", "language", "projector", "tune")


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights."""

    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    mixture: Mixture = field(default_factory=Mixture)
    vision: Stage = Stage(steps=2400, rows=64, rate=1.5e-3)
    language: Stage = Stage(steps=2400, rows=16, rate=1.5e-3)
    projector: Stage = Stage(steps=300, rows=48, rate=2e-3)
    tune: Stage = Stage(steps=1000, rows=16, rate=8e-4)
    first_steps: int = 700  # of the language stage, mostly on flat scenes and lists
    tokenizer_scenes: int = 6000

    def shortened(self, steps: int) -> Recipe:
        """Return the recipe with at most this many steps per stage, on as many images as they need."""
        stages = {name: replace(getattr(self, name), steps=min(steps, getattr(self, name).steps)) for name in STAGES}
        needed = max(stage.steps * stage.rows for stage in stages.values())
        mixture = replace(self.mixture, scenes=min(self.mixture.scenes, max(needed, 64)))
        few = min(self.tokenizer_scenes, 2000)
        return replace(self, mixture=mixture, tokenizer_scenes=few, **stages)


class Trainer:
    """Runs the stages of a recipe in a folder."""

    def __init__(self, recipe: Recipe, folder: Path, every: int = 100, progress: Any = None) -> None:
        self.recipe, self.folder, self.every, self.progress = recipe, folder, every, progress
        folder.mkdir(parents=True, exist_ok=True)

    # -- what the stages share -------------------------------------------------------------------------------------

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the recipe's tokenizer, which is trained on the first call."""
        path = self.folder / "tokenizer"
        if not (path / "done").exists():
            recipe = self.recipe
            texts = corpus(recipe.mixture, recipe.seed, recipe.tokenizer_scenes)
            train_tokenizer(texts, recipe.shape.vocabulary).save_pretrained(path)
            (path / "done").touch()
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
        return loaded

    def images(self) -> Images:
        """Return the rendered training scenes."""
        return prepare(self.folder / "images", self.recipe.mixture, self.recipe.seed)

    def fit(self, name: str, parts: nn.Module, loss_of: Loss) -> None:
        """Run a stage to its end, from its checkpoint if there is one."""
        weights = {k: p for k, p in parts.named_parameters() if p.requires_grad}
        checkpoint = Checkpoint(self.folder, name, _identity(self.recipe, name))
        fit(checkpoint, getattr(self.recipe, name), weights, loss_of, self.every, self.progress)

    def indices(self, name: str, step: int, rows: int, within: int) -> list[int]:
        """Return the scenes of a step; every pass over the scenes has a new permutation."""
        order = _Permutations(f"{self.recipe.seed}/{name}", within)
        return [order.at(step * rows + i) for i in range(rows)]

    # -- the stages ------------------------------------------------------------------------------------------------

    def vision(self) -> None:
        """Train the tower on patch words and tints."""
        model, images, stage = self._model(), self.images(), self.recipe.vision
        heads = _PatchHeads(self.recipe.shape.vision_width)
        learner = nn.ModuleDict({"tower": model.model.vision_tower, "heads": heads})
        _freeze_unused(model.model.vision_tower)

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            mirror = Dice(f"mirror/{self.recipe.seed}/{step}").chance(0.5)
            chosen = self.indices("vision", step, stage.rows, len(images))
            pixels, words, tints = images.batch(chosen, mirror)
            by_word, by_tint = heads(_features(model, pixels))
            first = F.cross_entropy(by_word.flatten(0, 1), words.flatten())
            second = F.cross_entropy(by_tint.flatten(0, 1), tints.flatten())
            objects = words < PATCH_WORDS.index("toothbrush") + 1
            right = (by_word.argmax(-1) == words).float()
            return first + 0.5 * second, {
                "right": float(right.mean()),
                "right_objects": float(right[objects].mean()),
                "right_tints": float((by_tint.argmax(-1) == tints)[tints > 0].float().mean()),
            }

        self.fit("vision", learner, loss_of)

    def language(self) -> None:
        """Train the language model on text and on scenes written as words."""
        model, stage, recipe = self._model(), self.recipe.language, self.recipe
        late = Writer(self.tokenizer(), recipe.mixture, recipe.seed)
        simple = replace(recipe.mixture, flat=recipe.mixture.first_flat, lists=recipe.mixture.first_lists)
        early = Writer(self.tokenizer(), simple, recipe.seed)

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            writer = early if step < recipe.first_steps else late
            chosen = self.indices("language", step, stage.rows, recipe.mixture.scenes)
            batch = writer.batch(chosen, f"language/{step}", recipe.mixture.text_only)
            return _language_loss(model, batch, _embed_words(model, batch))

        self.fit("language", model.model.language_model, loss_of)

    def projector(self) -> None:
        """Train only the projector: its outputs approach the words of the patches."""
        model, images, stage = self._model("vision", "language"), self.images(), self.recipe.projector
        writer = Writer(self.tokenizer(), self.recipe.mixture, self.recipe.seed)
        model.requires_grad_(False)
        projector = model.model.multi_modal_projector.requires_grad_(True)
        embed = model.model.language_model.embed_tokens.weight
        word_ids, tint_ids = torch.from_numpy(writer.word_ids), torch.from_numpy(writer.tint_ids)
        language_rows = max(1, stage.rows // 6)

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            chosen = self.indices("projector", step, stage.rows, len(images))
            pixels, words, tints = images.batch(chosen)
            with torch.no_grad():
                features = _features(model, pixels)
            projected = projector(features)  # (rows, slots, width)
            tint = tint_ids[tints]
            target_embeddings = embed[word_ids[words]] + embed[tint.clamp(min=0)] * (tint >= 0)[..., None]
            distance = (projected - target_embeddings).pow(2).sum(-1).mean() / target_embeddings.pow(2).sum(-1).mean()
            batch = writer.batch(chosen[:language_rows], f"projector/{step}")
            language, parts = _language_loss(model, batch, _embed_images(model, batch, projected[:language_rows]))
            return distance + 0.2 * language, {"apart": distance.item(), **parts}

        self.fit("projector", projector, loss_of)

    def tune(self) -> None:
        """Tune projector and language model on images; every position is still predicted."""
        model, images, stage = self._model("vision", "language", "projector"), self.images(), self.recipe.tune
        writer = Writer(self.tokenizer(), replace(self.recipe.mixture, noise=0.0, checklist=4), self.recipe.seed)
        model.requires_grad_(False)
        learner = _projector_and_language(model).requires_grad_(True)

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            chosen = self.indices("tune", step, stage.rows, len(images))
            pixels, _, _ = images.batch(chosen)
            with torch.no_grad():
                features = _features(model, pixels)
            batch = writer.batch(chosen, f"tune/{step}")
            return _language_loss(
                model, batch, _embed_images(model, batch, model.model.multi_modal_projector(features))
            )

        self.fit("tune", learner, loss_of)

    def finish(self, target: Path) -> None:
        """Write the finished model, with the recipe and the log of losses next to it."""
        model = self._model(*STAGES)
        save(model.eval(), make_processor(self.tokenizer()), target)
        (target / "recipe.json").write_text(json.dumps(asdict(self.recipe), indent=2) + "\n")
        (target / "training.jsonl").write_text(ordered_log(self.folder, STAGES))

    def _model(self, *finished: str) -> LlavaForConditionalGeneration:
        """Return the model with the weights of these finished stages."""
        model = make_model(self.tokenizer(), self.recipe.shape, self.recipe.seed)
        inner = model.model
        parts: dict[str, Any] = {
            "vision": nn.ModuleDict({"tower": inner.vision_tower}),
            "language": inner.language_model,
            "projector": inner.multi_modal_projector,
            "tune": _projector_and_language(model),
        }
        for name in finished:
            stage: Stage = getattr(self.recipe, name)
            saved = Checkpoint(self.folder, name, _identity(self.recipe, name)).finished(stage.steps)
            for key, parameter in parts[name].named_parameters():
                if key in saved:
                    parameter.data.copy_(saved[key])
        return model


def _projector_and_language(model: LlavaForConditionalGeneration) -> nn.ModuleDict:
    return nn.ModuleDict({"projector": model.model.multi_modal_projector, "language": model.model.language_model})


class _PatchHeads(nn.Module):
    """Linear classifiers of a patch: its word, and its tint (0: none)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.word = nn.Linear(width, len(PATCH_WORDS))
        self.tint = nn.Linear(width, len(COLORS) + 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.word(features), self.tint(features)


def _features(model: LlavaForConditionalGeneration, pixels: Tensor) -> Tensor:
    """Return the input of the projector.  -> (rows, slots, vision width)"""
    hidden: Tensor = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]
    return hidden[:, 1:]  # the class token is dropped, as LLaVA's "default" selection does


def _freeze_unused(tower: nn.Module) -> None:
    """Freeze the final norm of a CLIP tower, which LLaVA's features do not pass through."""
    for name, parameter in tower.named_parameters():
        if "post_layernorm" in name:
            parameter.requires_grad_(False)


def _embed_words(model: LlavaForConditionalGeneration, batch: Batch) -> Tensor:
    """Embed the inputs with the slots written as words, plus their tints.  -> (rows, length, width)"""
    embed = model.get_input_embeddings()
    tint = embed(batch.tint.clamp(min=0)) * (batch.tint >= 0)[..., None]
    embedded: Tensor = embed(batch.ids) + tint
    return embedded


def _embed_images(model: LlavaForConditionalGeneration, batch: Batch, projected: Tensor) -> Tensor:
    """Embed the inputs with the projector's outputs in the slots.  -> (rows, length, width)"""
    embedded = model.get_input_embeddings()(batch.ids)
    embedded_images: Tensor = embedded.masked_scatter(batch.slot[..., None], projected)
    return embedded_images


def _language_loss(
    model: LlavaForConditionalGeneration, batch: Batch, embedded: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Compute the weighted loss of predicting every token from those before it; padding has no weight."""
    hidden = model.model.language_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    keep = batch.mask[:, 1:] & (batch.weight[:, 1:] > 0)  # (rows, length - 1)
    logits = model.lm_head(hidden[:, :-1][keep])  # (kept, vocabulary)
    each = F.cross_entropy(logits, batch.ids[:, 1:][keep], reduction="none")
    weight = batch.weight[:, 1:][keep]
    content, verdicts, slots = weight == 4, weight == 3, batch.slot[:, 1:][keep]
    again = _repetition(model, batch, hidden)
    return (each * weight).sum() / weight.sum() - (1 - again).clamp(min=1e-4).log().mean(), {
        "again": again.mean().item(),
        "content": each[content].mean().item(),
        "right_content": (logits.argmax(-1) == batch.ids[:, 1:][keep])[content].float().mean().item(),
        "verdicts": each[verdicts].mean().item() if bool(verdicts.any()) else 0.0,
        "slots": each[slots].mean().item() if bool(slots.any()) else 0.0,
    }


def _repetition(model: LlavaForConditionalGeneration, batch: Batch, hidden: Tensor) -> Tensor:
    """Return the probability that a noun repeats an earlier one, which unlikelihood training reduces.  -> (nouns,)"""
    if not batch.again:
        return hidden.new_zeros(1)
    rows, places = (torch.tensor([entry[i] for entry in batch.again]) for i in (0, 1))
    named = torch.zeros(len(batch.again), model.config.get_text_config().vocab_size)
    for number, (_, _, tokens) in enumerate(batch.again):
        named[number, list(tokens)] = 1
    probabilities: Tensor = model.lm_head(hidden[rows, places - 1]).softmax(-1)  # (nouns, vocabulary)
    return (probabilities * named).sum(-1)


class _Permutations:
    """Repeatable random orders of 0..n-1, one for each pass: a four-round Feistel network with cycle walking."""

    def __init__(self, key: str, n: int) -> None:
        self.key, self.n = key, n
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)

    def at(self, position: int) -> int:
        """Return the index at a position, counted over all passes."""
        turn, value = divmod(position, self.n)
        keys = [Dice(f"{self.key}/{turn}/{r}").bits() for r in range(4)]
        low = (1 << self.half) - 1
        while True:
            left, right = value >> self.half, value & low
            for key in keys:
                mixed = ((right + key) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
                left, right = right, left ^ ((mixed >> 32) & low)
            value = (left << self.half) | right
            if value < self.n:
                return value


def _identity(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the settings that a stage's checkpoint and the recipe that resumes it must share."""
    whole = asdict(recipe)
    if name == "vision":  # the tower does not depend on texts
        shape = {key: value for key, value in whole["shape"].items() if key.startswith("vision") or key == "head"}
        mixture = {key: whole["mixture"][key] for key in ("scenes", "flat")}
        return {"seed": recipe.seed, "shape": shape, "mixture": mixture, name: whole[name]}
    return {key: whole[key] for key in ("seed", "shape", "mixture", "first_steps", name)}


def train(
    recipe: Recipe,
    folder: Path,
    target: Path | None = None,
    stages: tuple[str, ...] = STAGES,
    progress: Any = None,
    every: int = 100,
) -> Iterator[str]:
    """Run the stages one after the other, yielding the name of each when it is finished; write the model at the end."""
    for name in stages:
        if name not in STAGES:
            raise unknown("training stage", name, STAGES)
    trainer = Trainer(recipe, folder, every, progress)
    for name in stages:
        getattr(trainer, name)()
        yield name
    if target is not None:
        trainer.finish(target)
