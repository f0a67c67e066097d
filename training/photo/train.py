"""The recipe of `photo`: small trained parts between a pretrained vision transformer and a pretrained language model.

features   computes the tower's output once for every photo.
words      trains a temporary head to predict the words of patches.
projector  trains the projector to output, for each patch, the mixture of word embeddings that the head predicts, with part of
           every word's prior removed (otherwise each patch would predict "person"). The language model is not run.
adapter    trains low-rank adapters in the upper decoder layers on captions, checklists and presence questions; every vision
           token also predicts the words of its patch.

Matrix products run in bfloat16, which is fast only on CPUs that support it. Every stage can be interrupted and resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPVisionModel, LlamaForCausalLM, PreTrainedTokenizerFast

from revisit.errors import RevisitError, unknown
from revisit.models import photo as parts
from revisit.models.photo import OWN, read_language
from revisit.words import CATEGORIES
from training.adapter import attach
from training.fitting import Checkpoint, Stage, fit, ordered_log
from training.photo import tower as vision
from training.photo.data import Labels, Lists, Photos, batches
from training.photo.rows import NOUN, UNTRAINED, VERDICT, Batch, Writer
from training.photo.texts import Texts, words_of

STAGES = ("features", "words", "projector", "adapter")
LOGGED = STAGES[1:]
PRIOR = 0.6  # part of a word's prior that is removed from its patches
PRIOR_PHOTOS = 512  # photos that the prior is measured on
SHARPER = 2.0  # factor of the logits of a patch's words; without it many patches predict a little of everything
NEAR = 0.1  # temperature of the choice between words, in mean squared distances between them
BLOCK = 32  # photos at once where nothing is trained
LLAMA = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, besides the two pretrained models and the data."""

    seed: int = 30
    photos: int = 2304  # of the stage words: those with captions first
    captioned: int = 2304  # of the stages projector and adapter
    validation: int = 192
    first_layer: int = 8  # decoder layers below it stay as they are
    rank: int = 16
    words: Stage = Stage(steps=400, rows=32, rate=1e-3)
    projector: Stage = Stage(steps=1000, rows=12, rate=4e-3)
    adapter: Stage = Stage(steps=240, rows=4, rate=1e-3)
    vision_loss: float = 0.1  # weight of the loss that makes vision tokens predict the words of their patches

    def shortened(self, steps: int) -> Recipe:
        """Return the recipe with at most this many steps per stage, on as many photos as they need."""
        stages = {name: replace(getattr(self, name), steps=min(steps, getattr(self, name).steps)) for name in LOGGED}
        most = max(stage.steps * stage.rows for stage in stages.values())
        return replace(self, photos=min(self.photos, most), captioned=min(self.captioned, most), **stages)


@dataclass(frozen=True)
class Sources:
    """The data and the pretrained models."""

    photos: Photos
    labels: Labels
    captions: Mapping[int, Sequence[str]]
    lists: Lists
    tower: Path  # ONNX file
    language: Path  # GGUF file
    start: Path | None = None  # weights of ours whose adapters the stage adapter starts from


class Rows:
    """A growing file of arrays of one shape, one per photo; an interrupted run resumes it."""

    def __init__(self, path: Path, shape: tuple[int, ...], kind: str) -> None:
        self.path, self.shape, self.kind = path, shape, np.dtype(kind)
        self._size = int(np.prod(shape)) * self.kind.itemsize

    def __len__(self) -> int:
        return self.path.stat().st_size // self._size if self.path.exists() else 0

    def append(self, values: NDArray[Any]) -> None:
        """Append photos; an incomplete array at the end is cut off."""
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.seek(len(self) * self._size)
            file.truncate()
            file.write(np.ascontiguousarray(values, self.kind).tobytes())

    def read(self) -> NDArray[Any]:
        """Return all arrays. (photos, *shape)"""
        return np.memmap(self.path, self.kind, "r", shape=(len(self), *self.shape))


def as_bfloat16(stored: NDArray[Any]) -> Tensor:
    """Convert stored bits to numbers."""
    return torch.from_numpy(np.ascontiguousarray(stored)).view(torch.bfloat16)


def bits(values: Tensor) -> NDArray[Any]:
    """Convert numbers to the bits of bfloat16, which NumPy can store."""
    out: NDArray[Any] = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return out


class Trainer:
    """The stages of a recipe in a folder."""

    def __init__(self, recipe: Recipe, folder: Path, sources: Sources, every: int, progress: Any) -> None:
        self.recipe, self.folder, self.sources, self.every, self.progress = recipe, folder, sources, every, progress
        folder.mkdir(parents=True, exist_ok=True)
        lists = sources.lists
        self.captioned = lists.captioned[: recipe.captioned]
        self.validation = lists.validation[: recipe.validation]
        trained = (*lists.captioned, *lists.labelled)[: recipe.photos]
        self.order = (*trained, *self.validation)  # of the stage features
        if len(trained) < recipe.words.rows or not self.captioned:
            raise RevisitError(f"Only {len(trained)} photos to train on, {len(self.captioned)} with captions.")

    # -- what the stages share -------------------------------------------------------------------------------------

    @cached_property
    def tower(self) -> CLIPVisionModel:
        """The pretrained tower in bfloat16."""
        return parts.read_tower(self.sources.tower).bfloat16()

    @cached_property
    def width(self) -> int:
        """The width of the tower's hidden states."""
        return int(self.tower.config.hidden_size)

    def new_head(self) -> vision.PatchWords:
        """Build a fresh head that scores the words of patches."""
        torch.manual_seed(self.recipe.seed)
        return vision.PatchWords(self.width, 576, len(vision.PATCH_WORDS))

    @cached_property
    def language(self) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
        """The language model in float32 and its tokenizer."""
        model, tokenizer = read_language(self.sources.language)
        model.requires_grad_(False)
        return model, tokenizer

    @cached_property
    def writer(self) -> Writer:
        """The writer of the training sequences."""
        return Writer(self.language[1], vision.SLOTS)

    def new_projector(self) -> nn.Module:
        """Build a fresh projector from the tower's width to the language model's, with LLaVA's names of its parts."""
        wide = self.language[0].config.hidden_size
        torch.manual_seed(self.recipe.seed)
        projector = nn.Sequential()
        for name, part in (
            ("linear_1", nn.Linear(self.width, wide)),
            ("act", nn.GELU()),
            ("linear_2", nn.Linear(wide, wide)),
        ):
            projector.add_module(name, part)
        return projector

    def checkpoint(self, name: str) -> Checkpoint:
        """Return the checkpoint of a stage, with the settings that it depends on."""
        whole = asdict(self.recipe)
        seen = ("seed", "photos", "captioned", "words")
        needed = {
            "words": seen,
            "projector": (*seen, "projector"),
            "adapter": (*seen, "projector", "rank", "first_layer", "adapter", "vision_loss"),
        }
        return Checkpoint(self.folder, name, {key: whole[key] for key in needed[name]})

    def labels(self, photos: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return whether each photo has each word, and whether that is known. (photos, words) each"""
        objects = len(CATEGORIES)
        present = torch.zeros(len(photos), len(vision.PATCH_WORDS))
        known = torch.ones_like(present)
        for row, photo in enumerate(photos):
            present[row, self.sources.labels.objects[photo]] = 1
            if words := words_of(self.sources.captions.get(photo, ())):
                present[row, objects:] = torch.tensor([float(word in words) for word in vision.SCENE_WORDS])
            else:
                known[row, objects:] = 0
        return present, known

    # -- the stages ------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> Rows:
        """The file of the stage features."""
        return Rows(self.folder / "features.bin", (vision.SLOTS, self.width), "int16")

    def features(self) -> None:
        """Compute the tower's output for every photo."""
        with self.sources.photos as photos:
            for part in batches(self.order[len(self.rows) :], BLOCK):
                images = torch.stack([vision.pixels(photos.read(photo)) for photo in part])
                self.rows.append(bits(vision.see(self.tower, images)))
                if self.progress is not None:
                    self.progress("features", len(self.rows), len(self.order), 0.0)

    @cached_property
    def seen(self) -> NDArray[Any]:
        """The output of the stage `features`. (photos, slots, width)"""
        if len(self.rows) < len(self.order):
            raise RevisitError(f"The stage 'features' is not finished in {self.folder}; run it first.")
        return self.rows.read()

    def words(self) -> None:
        """Train a head for the words of patches."""
        recipe, seen, head = self.recipe, self.seen, self.new_head()
        count = len(self.order) - len(self.validation)

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            places = draw(recipe.seed, step, recipe.words.rows, count)
            present, known = self.labels([self.order[place] for place in places])
            return vision.words_loss(head(as_bfloat16(seen[places]))[0], present, known), {}

        weights = dict(head.named_parameters())
        fit(self.checkpoint("words"), recipe.words, weights, loss_of, self.every, self.progress, decay=0.01)
        with torch.no_grad():
            parts = [
                head(as_bfloat16(seen[np.array(part)]))[0] for part in batches(range(count, len(self.order)), BLOCK)
            ]
        if parts:
            found = vision.mean_average_precision(torch.cat(parts), self.labels(self.validation)[0])
            (self.folder / "words.txt").write_text(
                f"mean average precision on {len(self.validation)} validation photos: {found:.3f}\n"
            )

    @cached_property
    def head(self) -> vision.PatchWords:
        """The trained head."""
        head = self.new_head()
        head.load_state_dict(self.checkpoint("words").finished(self.recipe.words.steps))
        head.requires_grad_(False)
        return head

    @cached_property
    def prior(self) -> Tensor:
        """The logit of every word's mean probability over patches. (words,)"""
        few = range(min(PRIOR_PHOTOS, len(self.captioned)))
        means = [self.head(as_bfloat16(self.seen[np.array(part)]))[1].sigmoid().mean(1) for part in batches(few, BLOCK)]
        return torch.cat(means).mean(0).logit()

    def mixtures(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of photos (photos, words), and the shares of words in each patch (photos, slots, words)."""
        scores, logits = self.head(features)
        return scores, (SHARPER * (logits - PRIOR * self.prior)).softmax(-1)

    def projector(self) -> None:
        """Train the projector to output the embeddings of the words of a patch."""
        recipe, projector = self.recipe, self.new_projector()
        embedding: Tensor = self.language[0].model.embed_tokens.weight
        tokens = [torch.tensor(self.writer.encode(f" {word}")) for word in vision.PATCH_WORDS]
        words = torch.stack([embedding[ids].mean(0) for ids in tokens])
        apart = torch.cdist(words, words).square().mean()

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            places = draw(recipe.seed, step, recipe.projector.rows, len(self.captioned))
            features = as_bfloat16(self.seen[places])
            shares = self.mixtures(features)[1].flatten(0, 1)  # (patches, words)
            wanted = shares @ words
            with torch.autocast("cpu", torch.bfloat16):
                projected = projector(features.flatten(0, 1)).float()
            distance = (projected - wanted).square().sum(-1).mean() / wanted.square().sum(-1).mean()
            near = -torch.cdist(projected, words).square() / (NEAR * apart)
            chosen = -(shares * near.log_softmax(-1)).sum(-1).mean()
            right = (near.argmax(-1) == shares.argmax(-1)).float().mean()
            return distance + 0.1 * chosen, {"apart": distance.item(), "right": right.item()}

        weights = dict(projector.named_parameters())
        fit(self.checkpoint("projector"), recipe.projector, weights, loss_of, self.every, self.progress, decay=0.01)

    def adapter(self) -> None:
        """Train the adapters of the language model on texts about photos."""
        recipe, writer = self.recipe, self.writer
        projector = self.new_projector()
        projector.load_state_dict(self.checkpoint("projector").finished(recipe.projector.steps))
        projector.requires_grad_(False)
        model = self.language[0].bfloat16()
        model.set_attn_implementation("eager")  # faster than the fused one, backwards and with a mask
        layers = range(recipe.first_layer, model.config.num_hidden_layers)
        names = [f"layers.{n}.{block}.{linear}" for n in layers for block, many in LLAMA.items() for linear in many]
        weights = attach(model.model, names, recipe.rank, recipe.seed)
        if self.sources.start is not None:
            known = load_file(self.sources.start)
            for name, value in weights.items():
                value.data.copy_(known[f"adapter.{name}"])
        texts = Texts(self.sources.labels.objects, self.sources.captions)
        slot_words = torch.tensor([writer.first(word) for word in vision.PATCH_WORDS])

        def loss_of(step: int) -> tuple[Tensor, dict[str, float]]:
            places = draw(recipe.seed + 1, step, recipe.adapter.rows, len(self.captioned))
            features = as_bfloat16(self.seen[places])
            scores, shares = self.mixtures(features)
            rows = [
                writer.row(texts.turns(self.captioned[place], score, f"{recipe.seed}/{step}/{place}"))
                for place, score in zip(places, scores.numpy(), strict=True)
            ]
            batch, projected = writer.batch(rows), projector(features.float())
            return language_loss(model, writer, batch, projected, shares, slot_words, recipe.vision_loss)

        fit(self.checkpoint("adapter"), recipe.adapter, weights, loss_of, self.every, self.progress, decay=0.0)

    def finish(self, target: Path) -> None:
        """Write the trained parts in float16, with the recipe and the log of losses beside them."""
        target.mkdir(parents=True, exist_ok=True)
        recipe = self.recipe
        projector = self.checkpoint("projector").finished(recipe.projector.steps)
        own = {f"multi_modal_projector.{key}": value for key, value in projector.items()}
        adapter = self.checkpoint("adapter").finished(recipe.adapter.steps)
        own |= {f"adapter.{key}": value for key, value in adapter.items()}
        save_file({key: value.half().contiguous() for key, value in own.items()}, target / OWN)
        (target / "recipe.json").write_text(json.dumps(asdict(recipe), indent=2) + "\n")
        (target / "training.jsonl").write_text(ordered_log(self.folder, LOGGED))


def draw(seed: int, step: int, rows: int, count: int) -> NDArray[Any]:
    """Return the indices of a step's photos; every pass over the photos has a new order. (rows,)"""
    places = np.arange(step * rows, (step + 1) * rows)
    orders = {
        number: np.random.default_rng([seed, number]).permutation(count) for number in set((places // count).tolist())
    }
    return np.array([orders[place // count][place % count] for place in places.tolist()])


def hidden_states(model: LlamaForCausalLM, writer: Writer, batch: Batch, projected: Tensor) -> Tensor:
    """Return the last hidden states of a batch, with the projector's outputs in the slots. (rows, length, width)"""
    embedded: Tensor = model.get_input_embeddings()(batch.ids)
    embedded = embedded.masked_scatter((batch.ids == writer.image)[..., None], projected.to(embedded.dtype))
    hidden_from = torch.finfo(embedded.dtype).min
    mask = torch.zeros(batch.visible.shape, dtype=embedded.dtype).masked_fill(~batch.visible, hidden_from)
    hidden: Tensor = model.model(
        inputs_embeds=embedded, attention_mask=mask[:, None], position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    return hidden


def language_loss(
    model: LlamaForCausalLM,
    writer: Writer,
    batch: Batch,
    projected: Tensor,
    shares: Tensor,
    slot_words: Tensor,
    vision_loss: float,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the weighted loss of the answers, of the words of every slot, and of naming an object twice.

    The whole head is only applied where an answer is predicted; slots choose among the patch words.
    """
    hidden = hidden_states(model, writer, batch, projected)
    trained = batch.labels[:, 1:] != UNTRAINED  # (rows, length - 1)
    wanted, weight = batch.labels[:, 1:][trained], batch.weights[:, 1:][trained]
    logits = model.lm_head(hidden[:, :-1][trained]).float()  # (trained, vocabulary)
    talk = (F.cross_entropy(logits, wanted, reduction="none") * weight).sum() / weight.sum()
    start = len(writer.before)
    slot_logits = F.linear(hidden[:, start : start + writer.slots], model.lm_head.weight[slot_words]).float()
    slots = -(shares * slot_logits.log_softmax(-1)).sum(-1).mean()
    again = repetition(logits, trained, batch)
    right = (logits.argmax(-1) == wanted).float()
    asked = weight == VERDICT
    checked = torch.isin(wanted, torch.tensor(sorted(writer.verdicts))) & ~asked
    return talk + vision_loss * slots - 0.4 * (1 - again).clamp(min=1e-4).log().mean(), {
        "talk": talk.item(),
        "right_nouns": right[weight == NOUN].mean().item(),
        "right_presence": right[asked].mean().item(),
        "right_checked": right[checked].mean().item(),
        "slots": slots.item(),
        "again": again.mean().item(),
    }


def repetition(logits: Tensor, trained: Tensor, batch: Batch) -> Tensor:
    """Return the probability that a noun repeats an earlier one, which unlikelihood training reduces. (nouns,)"""
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
    sources: Sources,
    target: Path | None = None,
    stages: Sequence[str] = STAGES,
    progress: Any = None,
    every: int = 50,
) -> Iterator[str]:
    """Run the stages one after the other, yielding the name of each when it is finished; write the weights at the end."""
    for name in stages:
        if name not in STAGES:
            raise unknown("training stage", name, STAGES)
    trainer = Trainer(recipe, folder, sources, every, progress)
    for name in stages:
        getattr(trainer, name)()
        yield name
    if target is not None:
        trainer.finish(target)
