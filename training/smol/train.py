"""The recipe of the second embedded model: between a frozen tower and a frozen language model, two small parts learn.

projector  the output for each patch approaches the word embedding of what the patch shows, plus half of its tint's. No pass
           through the language model.
adapter    low-rank matrices in the upper decoder layers learn captions, lists, checklists and questions about pictures, and
           every slot predicts the word of the next one. Lists of scenes without habits come first.

Stages are kept, resumed and logged as those of `training.tiny.train` are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from revisit.embedded.catalog import COLORS
from revisit.embedded.scenes import Scene, render
from revisit.errors import RevisitError, unknown
from revisit.models.config import embedded_folder
from revisit.models.smol import OWN, check_language_file, language_file, read_language
from training.fitting import Checkpoint, Stage, fit, ordered_log
from training.smol.adapter import attach
from training.smol.data import NOTHING, Batch, Writer
from training.texts import PATCH_WORDS, patch_labels
from training.tiny.data import Mixture, normalized, training_scene
from training.tiny.model import SLOTS

STAGES = ("projector", "adapter")
TINT = 0.5  # weight of a tint's embedding beside its object's
NEAR = 0.1  # temperature of the choice between words, in mean squared distances between them
FIRST_PICTURE = 100_000  # the projector's scenes lie behind the adapter's in the training stream


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, beside the language model and the tower."""

    seed: int = 7
    rank: int = 12
    first_layer: int = 8  # decoder layers below it stay as they are
    mixture: Mixture = field(default_factory=lambda: Mixture(assume=0.35, lists=0.2, first_flat=0.6, first_lists=0.7))
    first_steps: int = 80  # of the adapter stage, mostly on flat scenes and lists
    pictures: int = 2560  # of the projector stage
    projector: Stage = Stage(steps=800, rows=32, rate=2e-3)
    adapter: Stage = Stage(steps=400, rows=3, rate=1.2e-3)

    def __post_init__(self) -> None:
        if self.pictures % self.projector.rows:
            raise RevisitError(f"pictures is {self.pictures}; it must be a multiple of the projector's rows.")

    def shortened(self, steps: int) -> Recipe:
        """The same recipe with at most this many steps a stage, on as many pictures as they need."""
        stages = {name: replace(getattr(self, name), steps=min(steps, getattr(self, name).steps)) for name in STAGES}
        pictures = min(self.pictures, stages["projector"].steps * self.projector.rows)
        return replace(self, pictures=pictures, **stages)


class Trainer:
    """The stages of a recipe in a folder, for a language model in a GGUF file and the tower of a LLaVA folder."""

    def __init__(self, recipe: Recipe, folder: Path, language: Path, tower: Path, every: int, progress: Any) -> None:
        self.recipe, self.folder, self.every, self.progress = recipe, folder, every, progress
        self._language, self._tower = language, tower
        folder.mkdir(parents=True, exist_ok=True)

    # -- what the stages share -------------------------------------------------------------------------------------

    @cached_property
    def _read(self) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
        model, tokenizer = read_language(self._language)
        model.requires_grad_(False)
        return model, tokenizer

    @cached_property
    def llava(self) -> LlavaForConditionalGeneration:
        """The LLaVA model whose tower sees."""
        model = LlavaForConditionalGeneration.from_pretrained(self._tower, dtype=torch.float32)
        assert isinstance(model, LlavaForConditionalGeneration)
        model.eval().requires_grad_(False)
        return model

    @cached_property
    def writer(self) -> Writer:
        """Of the training texts."""
        return Writer(self._read[1], self.recipe.seed)

    def features(self, scenes: Sequence[Scene]) -> Tensor:
        """What the tower hands to the projector. (scenes, slots, vision width)"""
        pixels = normalized(np.stack([np.asarray(render(drawn)) for drawn in scenes]))
        with torch.no_grad():
            hidden: Tensor = self.llava.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]
        return hidden[:, 1:]  # without the class token

    def new_projector(self) -> nn.Module:
        """A fresh projector from the tower's width to the language model's, named as LLaVA names its parts."""
        wide = self._read[0].config.hidden_size
        narrow = self.llava.model.multi_modal_projector.linear_1.in_features
        torch.manual_seed(self.recipe.seed)
        first, second = nn.Linear(narrow, wide), nn.Linear(wide, wide)
        projector = nn.Sequential()
        for name, part in (("linear_1", first), ("act", nn.GELU()), ("linear_2", second)):
            projector.add_module(name, part)
        return projector

    def checkpoint(self, name: str) -> Checkpoint:
        """Of a stage, with the settings that it depends on."""
        whole = asdict(self.recipe)
        needed = {
            "projector": ("seed", "mixture", "pictures", "projector"),
            "adapter": ("seed", "mixture", "rank", "first_layer", "first_steps", "adapter"),
        }
        return Checkpoint(self.folder, name, {key: whole[key] for key in needed[name]})

    def finished_projector(self) -> nn.Module:
        """The projector after its stage, frozen."""
        projector = self.new_projector()
        projector.load_state_dict(self.checkpoint("projector").finished(self.recipe.projector.steps))
        return projector.requires_grad_(False)

    # -- the stages ------------------------------------------------------------------------------------------------

    def projector(self) -> None:
        """Train the projector: patches become words."""
        recipe, projector = self.recipe, self.new_projector()
        words, tints = self._word_embeddings()
        apart = torch.cdist(words, words).square().mean()
        rows = recipe.projector.rows
        pictures = cache(self._pictures)  # seen again in every pass

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            features, word, tint = pictures(step * rows % recipe.pictures, rows)
            shade = TINT * tints[tint]  # (rows, slots, width)
            projected, wanted = projector(features), words[word] + shade
            distance = (projected - wanted).square().sum(-1).mean() / wanted.square().sum(-1).mean()
            near = -torch.cdist((projected - shade).flatten(0, 1), words).square() / (NEAR * apart)  # (slots, words)
            chosen = F.cross_entropy(near, word.flatten())
            right = (near.argmax(-1) == word.flatten()).float().mean()
            return distance + 0.3 * chosen, {"apart": distance.item(), "right": right.item()}

        weights = dict(projector.named_parameters())
        fit(self.checkpoint("projector"), recipe.projector, weights, loss_of, self.every, self.progress, decay=0.01)

    def adapter(self) -> None:
        """Train the adapter: the language model learns to talk about pictures."""
        recipe, writer, projector = self.recipe, self.writer, self.finished_projector()
        model = self._read[0]
        weights = attach(model, recipe.first_layer, recipe.rank, recipe.seed)
        late = recipe.mixture
        early = replace(late, flat=late.first_flat, lists=late.first_lists)
        vocabulary = writer.vocabulary(late)

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            rows = recipe.adapter.rows
            mixture = early if step < recipe.first_steps else late
            batch = writer.batch(range(step * rows, (step + 1) * rows), f"smol/{step}", mixture)
            return language_loss(model, writer, batch, projector(self.features(batch.scenes)), vocabulary)

        fit(self.checkpoint("adapter"), recipe.adapter, weights, loss_of, self.every, self.progress, decay=0.0)

    def _pictures(self, start: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features (rows, slots, vision width), words and tints (rows, slots) of some scenes."""
        numbers = range(FIRST_PICTURE + start, FIRST_PICTURE + start + rows)
        scenes = [training_scene(self.recipe.mixture, self.recipe.seed, number) for number in numbers]
        return (self.features(scenes), *patch_tensors(scenes))

    def _word_embeddings(self) -> tuple[Tensor, Tensor]:
        """The mean embedding of the tokens of every patch word (words, width) and tint (tints + 1, width); tint 0 is none."""
        embedding: Tensor = self._read[0].model.embed_tokens.weight

        def mean(word: str) -> Tensor:
            tokens = torch.tensor(self.writer.encode(f" {word}"))
            return embedding[tokens].mean(0)

        words = torch.stack([mean(word) for word in PATCH_WORDS])
        return words, torch.stack([torch.zeros_like(words[0]), *(mean(color) for color in COLORS)])

    def finish(self, target: Path) -> None:
        """Write what is ours in float16, with the recipe and the log of losses beside it."""
        target.mkdir(parents=True, exist_ok=True)
        projector = self.checkpoint("projector").finished(self.recipe.projector.steps)
        adapter = self.checkpoint("adapter").finished(self.recipe.adapter.steps)
        own = {f"multi_modal_projector.{key}": value for key, value in projector.items()}
        own |= {f"adapter.{key}": value for key, value in adapter.items()}
        save_file({key: value.half().contiguous() for key, value in own.items()}, target / OWN)
        (target / "recipe.json").write_text(json.dumps(asdict(self.recipe), indent=2) + "\n")
        (target / "training.jsonl").write_text(ordered_log(self.folder, STAGES))


def patch_tensors(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """The word and the tint of every slot. (scenes, slots) each"""
    labels = [patch_labels(drawn) for drawn in scenes]
    words, tints = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*labels, strict=True))
    return words, tints


def language_loss(
    model: LlamaForCausalLM, writer: Writer, batch: Batch, projected: Tensor, vocabulary: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The weighted loss of the answers, of every slot's next word, and of naming an object twice.

    The whole head is only applied where an answer is predicted; slots choose among the tokens that scene texts use.
    """
    hidden = states(model, writer, batch, projected)
    trained = batch.labels[:, 1:] != NOTHING  # (rows, length - 1)
    wanted, weight = batch.labels[:, 1:][trained], batch.weights[:, 1:][trained]
    logits = model.lm_head(hidden[:, :-1][trained])  # (trained, vocabulary)
    each = F.cross_entropy(logits, wanted, reduction="none")
    talk = (each * weight).sum() / weight.sum()
    slots = _slot_loss(model, writer, batch, hidden, vocabulary)
    again = _repetition(logits, trained, batch)
    right = (logits.argmax(-1) == wanted).float()
    verdicts = torch.isin(wanted, torch.tensor(sorted(writer.verdicts)))
    content = (weight == 4) & ~verdicts
    return talk + 0.15 * slots - 0.5 * (1 - again).clamp(min=1e-4).log().mean(), {
        "talk": talk.item(),
        "right_content": right[content].mean().item(),
        "right_verdicts": right[verdicts].mean().item(),
        "slots": slots.item(),
        "again": again.mean().item(),
    }


def states(model: LlamaForCausalLM, writer: Writer, batch: Batch, projected: Tensor) -> Tensor:
    """The last hidden states of a batch with the projector's outputs in the slots. (rows, length, width)"""
    embedded = model.get_input_embeddings()(batch.ids)
    embedded = embedded.masked_scatter((batch.ids == writer.image)[..., None], projected)
    mask = torch.zeros(batch.visible.shape).masked_fill(~batch.visible, torch.finfo(torch.float32).min)
    hidden: Tensor = model.model(
        inputs_embeds=embedded, attention_mask=mask[:, None], position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    return hidden


def _slot_loss(model: LlamaForCausalLM, writer: Writer, batch: Batch, hidden: Tensor, vocabulary: Tensor) -> Tensor:
    """The loss of every slot's prediction of the next slot's word, among the tokens of `vocabulary`."""
    words, _ = patch_tensors(batch.scenes)
    wanted = torch.searchsorted(vocabulary, writer.patch_words[words])  # (rows, slots)
    start = len(writer.before)
    logits = F.linear(hidden[:, start : start + SLOTS - 1], model.lm_head.weight[vocabulary])
    return F.cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten())


def _repetition(logits: Tensor, trained: Tensor, batch: Batch) -> Tensor:
    """The probability that a noun repeats one that was named before; unlikelihood training makes it small. (nouns,)"""
    if not batch.named:
        return logits.new_zeros(1)
    order = trained.flatten().cumsum(0).view_as(trained) - 1  # place of a position among the trained ones
    places = torch.tensor([int(order[row, position - 1]) for row, position, _ in batch.named])
    named = torch.zeros(len(batch.named), logits.shape[-1])
    for number, (_, _, tokens) in enumerate(batch.named):
        named[number, tokens] = 1
    return (logits[places].softmax(-1) * named).sum(-1)


def train(
    recipe: Recipe,
    folder: Path,
    target: Path | None = None,
    stages: tuple[str, ...] = STAGES,
    progress: Any = None,
    every: int = 50,
    language: Path | None = None,
) -> Iterator[str]:
    """Run the stages one after the other, yielding the name of each when it is finished; write the weights at the end.

    Without `language`, the language model is the installed package's.
    """
    for name in stages:
        if name not in STAGES:
            raise unknown("training stage", name, STAGES)
    if language is None:
        check_language_file(language := language_file())
    trainer = Trainer(recipe, folder, language, embedded_folder(), every, progress)
    for name in stages:
        getattr(trainer, name)()
        yield name
    if target is not None:
        trainer.finish(target)
