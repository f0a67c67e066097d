"""Training data: images rendered once into a memory map, and token sequences generated on the fly.

Every batch is a pure function of the seed and the step, so that a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from revisit.embedded.catalog import CATEGORIES, COLORS
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import GRID, SIZE, Scene, render, scene
from revisit.embedded.text import caption
from revisit.words import WORDS
from training.texts import DESCRIBE, PATCH_WORDS, Turn, checklist, listing, patch_labels, questions
from training.tiny.model import ASSISTANT, BOS, EOS, MEAN, SLOTS, STD, USER, token_id, word_id

STREAM = "train"
LONGEST = 200  # tokens of a training sequence before its checklist


@dataclass(frozen=True)
class Mixture:
    """The distribution of training scenes and texts."""

    scenes: int = 60_000  # different images
    flat: float = 0.25  # share of scenes without any habit of place
    first_flat: float = 0.7  # the same share at the beginning of the language stage, where copying is learned
    checklist: int = 6  # absent objects in the checklist at the end of each sequence; 0: no checklist
    assume: float = 0.5  # chance that a caption names a missing core object of its place
    text_only: float = 0.15  # share of sequences without an image, for the language model
    lists: float = 0.15  # share of scenes with a bare list of their objects instead of a caption
    first_lists: float = 0.6  # the same share at the beginning of the language stage
    turns: int = 1  # questions beside each caption or list
    noise: float = 0.06  # share of wrong patch words in half of the written scenes


def training_scene(mixture: Mixture, seed: int, index: int) -> Scene:
    """Return scene number `index` of the training stream."""
    flat = Dice(f"kind/{seed}/{index}").chance(mixture.flat)
    return scene("flat" if flat else "usual", seed, index, stream=STREAM)


class Images:
    """The rendered training scenes: pixels, patch words and patch tints, on disk."""

    def __init__(self, folder: Path, mixture: Mixture, seed: int) -> None:
        self.mixture, self.seed = mixture, seed
        n = mixture.scenes
        self.pixels = np.memmap(folder / "pixels.u8", np.uint8, "r", shape=(n, SIZE, SIZE, 3))
        self.words = np.memmap(folder / "words.u8", np.uint8, "r", shape=(n, SLOTS))
        self.tints = np.memmap(folder / "tints.u8", np.uint8, "r", shape=(n, SLOTS))

    def __len__(self) -> int:
        return self.mixture.scenes

    def batch(self, indices: Sequence[int], mirror: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized pixels (n, 3, SIZE, SIZE), patch words and tints (n, SLOTS), mirrored left to right with `mirror`."""
        where = np.asarray(indices)
        pixels, words, tints = self.pixels[where], self.words[where], self.tints[where]
        if mirror:
            pixels = pixels[:, :, ::-1]
            words, tints = (a.reshape(-1, GRID, GRID)[..., ::-1].reshape(-1, SLOTS) for a in (words, tints))
        return normalized(pixels), torch.from_numpy(words.astype(np.int64)), torch.from_numpy(tints.astype(np.int64))


def normalized(pixels: np.ndarray) -> Tensor:
    """Normalize images (n, SIZE, SIZE, 3) of bytes for the tower.  -> (n, 3, SIZE, SIZE)"""
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255
    shape = (1, 3, 1, 1)
    return (tensor - torch.tensor(MEAN).view(shape)) / torch.tensor(STD).view(shape)


def prepare(folder: Path, mixture: Mixture, seed: int, progress: Any = None) -> Images:
    """Render the images of a mixture into `folder` unless they are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "images.json"
    wanted = json.dumps({"seed": seed, **{k: v for k, v in asdict(mixture).items() if k in ("scenes", "flat")}})
    if not (stamp.exists() and stamp.read_text() == wanted):
        n = mixture.scenes
        pixels = np.memmap(folder / "pixels.u8", np.uint8, "w+", shape=(n, SIZE, SIZE, 3))
        words = np.memmap(folder / "words.u8", np.uint8, "w+", shape=(n, SLOTS))
        tints = np.memmap(folder / "tints.u8", np.uint8, "w+", shape=(n, SLOTS))
        for index in range(n):
            drawn = training_scene(mixture, seed, index)
            pixels[index] = np.asarray(render(drawn))
            words[index], tints[index] = patch_labels(drawn)
            if progress is not None:
                progress(index + 1, n)
        for array in (pixels, words, tints):
            array.flush()
        stamp.write_text(wanted)
    return Images(folder, mixture, seed)


def corpus(mixture: Mixture, seed: int, n: int) -> list[str]:
    """Return text for the tokenizer: captions, questions and answers of n scenes, patch words, and all of CHAIR's object words."""
    out: list[str] = []
    for index in range(n):
        drawn, dice = training_scene(mixture, seed, index), Dice(f"corpus/{seed}/{index}")
        out.append(caption(drawn, dice, mixture.assume))
        out.append(listing(drawn, dice).question)
        out.extend(f"{turn.question} {turn.answer}" for turn in questions(drawn, dice, 3))
    out.extend(DESCRIBE)
    out.extend(" " + " ".join((*PATCH_WORDS, *COLORS)) for _ in range(4))
    out.extend(" " + " ".join(sorted(WORDS)) for _ in range(2))
    return out


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: tokens, image slots, and the weight of each position's prediction."""

    ids: Tensor  # (rows, length), with the slots' words written out
    tint: Tensor  # (rows, length): the color token added at a slot, or -1
    slot: Tensor  # (rows, length) bool
    weight: Tensor  # (rows, length): weight of predicting this token from the ones before
    mask: Tensor  # (rows, length) bool: not padding
    has_image: Tensor  # (rows,) bool: has slots
    again: list[tuple[int, int, tuple[int, ...]]]  # (row, position of a noun, nouns that were named before it)


class Writer:
    """Write scenes as token sequences in the chat format."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, mixture: Mixture, seed: int) -> None:
        self.tokenizer, self.mixture, self.seed = tokenizer, mixture, seed
        self.bos, self.eos, self.user, self.assistant = (token_id(tokenizer, t) for t in (BOS, EOS, USER, ASSISTANT))
        self.newline = tokenizer.encode("\n")
        (self.stop,), (self.comma,) = tokenizer.encode("."), tokenizer.encode(",")
        self.word_ids = np.array([word_id(tokenizer, w) for w in PATCH_WORDS])
        self.tint_ids = np.array([-1] + [word_id(tokenizer, c) for c in COLORS])
        pairs = [(word_id(tokenizer, c.noun), word_id(tokenizer, c.plural)) for c in CATEGORIES]
        self.forms = {form: pair for pair in pairs for form in pair}  # token -> singular and plural of the same noun
        forms = [form for c in CATEGORIES for form in (c.noun, c.plural)]
        self.content = {
            word_id(tokenizer, w) for w in (*forms, *COLORS, "two", "three", "left", "right", "top", "bottom")
        }
        self.content |= {tokenizer.encode(w)[0] for w in ("Yes", "No")}
        self.verdicts = {word_id(tokenizer, "yes"), word_id(tokenizer, "no")}
        self.encode = lru_cache(maxsize=50_000)(lambda text: tuple(tokenizer.encode(text)))

    def turns(self, drawn: Scene, dice: Dice) -> list[Turn]:
        """Write a caption and questions; half of the time the caption comes first, otherwise anywhere."""
        if dice.chance(self.mixture.lists):
            told = listing(drawn, dice)
        else:
            told = Turn("caption", dice.pick(DESCRIBE), caption(drawn, dice, self.mixture.assume, plain=True))
        asked = questions(drawn, dice, self.mixture.turns)
        turns = [told, *asked] if dice.chance(0.5) else dice.shuffled([told, *asked])
        if self.mixture.checklist:  # at the end, where nothing before it can be copied from it
            turns.append(checklist(drawn, dice, self.mixture.checklist))
        return turns

    def row(
        self, index: int, key: str, has_image: bool
    ) -> tuple[list[int], list[int], list[bool], list[float], list[tuple[int, tuple[int, ...]]]]:
        """Return one scene as tokens, tints, slot flags, weights, and the nouns that each noun of a caption or list must not repeat."""
        again: list[tuple[int, tuple[int, ...]]] = []
        drawn, dice = training_scene(self.mixture, self.seed, index), Dice(f"{key}/{index}")
        ids, weights = [self.bos, self.user], [0.0, 0.0]
        tints, slots = [-1, -1], [False, False]
        turns = self.turns(drawn, dice)
        if has_image:
            words, tint = (a.astype(np.int64) for a in patch_labels(drawn))
            ids += self.word_ids[self._noisy(words, dice)].tolist()
            tints += self.tint_ids[tint].tolist()
            slots += [True] * SLOTS
            weights += [0.5] * SLOTS
            ids += self.newline
            weights += [0.1] * len(self.newline)
        else:
            turns = [t for t in turns if t.kind in ("caption", "list")]
        for number, turn in enumerate(turns):
            question, answer = self.encode(turn.question), self.encode(turn.answer)
            start = [] if number == 0 else [self.user]
            length = len(ids) + len(start) + len(question) + len(answer) + 2
            if length > LONGEST and turn.kind != "checklist":
                continue  # a rare long conversation would pad all the others
            ids += [*start, *question, self.assistant]
            if turn.kind in ("caption", "list"):
                again += self._named_before(len(ids), answer)
            ids += [*answer, self.eos]
            weights += [0.1] * (len(start) + len(question) + 1)
            weights += [*self._weights(turn.kind, answer), 2.0 if turn.kind in ("caption", "list") else 0.6]
        tints += [-1] * (len(ids) - len(tints))
        slots += [False] * (len(ids) - len(slots))
        return ids, tints, slots, weights, again

    def _named_before(self, start: int, answer: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Return for each noun of an answer that starts at `start` its position and all forms of the nouns before it."""
        out: list[tuple[int, tuple[int, ...]]] = []
        before: set[int] = set()
        for offset, token in enumerate(answer):
            if token in self.forms:
                if earlier := before - set(self.forms[token]):
                    out.append((start + offset, tuple(sorted(earlier))))
                before |= set(self.forms[token])
        return out

    def _weights(self, kind: str, answer: Sequence[int]) -> list[float]:
        """Return the weights of an answer: largest for words that depend on the image, then for whether it continues.

        A checklist's arbitrary choice of nouns hardly counts.
        """
        if kind == "checklist":
            return [3.0 if token in self.verdicts else 0.1 for token in answer]
        going_on = {self.stop, self.comma} if kind == "list" else set()
        weights = [4.0 if len(answer) == 1 or token in self.content else 0.6 for token in answer]
        for place, token in enumerate(answer):
            if token in going_on or (place and answer[place - 1] == self.stop):
                weights[place] = 2.0
        return weights

    def _noisy(self, words: np.ndarray, dice: Dice) -> np.ndarray:
        if self.mixture.noise and dice.chance(0.5):
            for i in range(SLOTS):
                if dice.chance(self.mixture.noise):
                    words[i] = words[dice.below(SLOTS)] if dice.chance(0.7) else dice.below(len(PATCH_WORDS))
        return words

    def batch(self, indices: Sequence[int], key: str, text_only: float = 0.0) -> Batch:
        """Return the sequences of some scenes; `key` varies their texts from one use to the next."""
        without = [Dice(f"text/{key}/{i}").chance(text_only) for i in indices]
        rows = [self.row(i, key, not bare) for i, bare in zip(indices, without, strict=True)]
        length = max(len(row[0]) for row in rows)
        pad = self.tokenizer.pad_token_id

        def tensor(column: int, fill: Any, dtype: torch.dtype) -> Tensor:
            padded = [list(row[column]) + [fill] * (length - len(row[column])) for row in rows]
            return torch.tensor(padded, dtype=dtype)

        mask = torch.tensor([[True] * len(r[0]) + [False] * (length - len(r[0])) for r in rows])
        return Batch(
            tensor(0, pad, torch.long),
            tensor(1, -1, torch.long),
            tensor(2, False, torch.bool),
            tensor(3, 0.0, torch.float32),
            mask,
            torch.tensor([not bare for bare in without]),
            [(number, at, ids) for number, row in enumerate(rows) for at, ids in row[4]],
        )
