"""Features of the vision tower, and a head that learns the words of single patches.

Labels name the objects of a photo but not their places. So every patch scores every word, the photo's score of a word is a soft
maximum over its patches, and only this score is compared with the labels (multiple-instance learning).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPVisionModel

from revisit.models.photo import LAYER, MEAN, PATCH, SIZE, STD
from revisit.words import CATEGORIES

SLOTS = (SIZE // PATCH) ** 2  # vision tokens

# The words of patches: CHAIR's objects, and other frequent words of captions.
# fmt: off
SCENE_WORDS: tuple[str, ...] = (
    "street", "field", "room", "water", "grass", "food", "city", "plate", "road", "board", "snow",
    "park", "wall", "bathroom", "air", "shirt", "kitchen", "beach", "ground", "sky", "ocean",
    "sidewalk", "window", "floor", "counter", "tree", "hill", "fence", "mirror", "dirt", "court",
    "buildings", "slope", "snowy", "vegetables", "mountain", "track", "hat", "skate", "surf", "glasses",
    "crowd", "suit", "door", "restaurant", "station", "herd", "home", "wave", "animals", "fruit",
    "brick", "flowers", "tower", "gray", "house", "enclosure", "intersection", "stuffed", "paper",
    "racquet", "coffee", "forest", "surfer", "zoo", "video", "wii", "sunny", "meal", "lush", "stone",
    "animal", "river", "cheese", "meat", "airport", "bag", "box", "drink", "jacket", "sand", "tray",
    "batter", "been", "bedroom", "edge", "furniture", "dish", "mouth", "towards", "ramp", "double",
    "lake", "sun", "silver", "shows", "cloudy", "shelf", "slice", "store",
)
# fmt: on
PATCH_WORDS: tuple[str, ...] = (*CATEGORIES, *SCENE_WORDS)


def pixels(photo: Image.Image) -> Tensor:
    """Resize a photo to a square and normalize it. (3, SIZE, SIZE)"""
    small = photo.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3).permute(2, 0, 1)
    return (values.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def see(tower: CLIPVisionModel, images: Tensor) -> Tensor:
    """Return the projector's input: one of the tower's hidden states without its class token. (photos, SLOTS, width)"""
    with torch.no_grad():
        states: Tensor = tower(images.to(tower.dtype), output_hidden_states=True).hidden_states[LAYER]
    return states[:, 1:]


class PatchWords(nn.Module):
    """Scores of every word for every patch, and for the whole photo as a soft maximum over patches."""

    def __init__(self, width: int, hidden: int, words: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, words)
        nn.init.constant_(self.second.bias, -4.0)
        self.sharpness = nn.Parameter(torch.tensor(1.1))  # logarithm

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of photos (photos, words) and of patches (photos, patches, words)."""
        with torch.autocast("cpu", torch.bfloat16):
            patches = self.second(F.gelu(self.first(self.norm(features.float())))).float()
        sharp = self.sharpness.exp()
        pooled = torch.logsumexp(patches * sharp, 1) - math.log(patches.shape[1])
        return pooled / sharp, patches


def words_loss(scores: Tensor, labels: Tensor, known: Tensor) -> Tensor:
    """Compute the binary cross entropy, summed over words; scene words count half, and not at all for photos without captions."""
    each = F.binary_cross_entropy_with_logits(scores, labels * 0.96 + 0.01, reduction="none") * known
    objects = len(CATEGORIES)
    return each[:, :objects].sum(1).mean() + 0.5 * each[:, objects:].sum(1).mean()


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Return the mean average precision over the words of at least three photos."""
    found = []
    for score, label in zip(scores.T, labels.T, strict=True):
        if label.sum() < 3:
            continue
        right = label[score.argsort(descending=True)]
        precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
        found.append(float((precision * right).sum() / right.sum()))
    return sum(found) / max(1, len(found))
