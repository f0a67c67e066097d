"""Random models of real shapes, their prompts, and next-token logits with plausible sets of stated sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from revisit.errors import RevisitError, unknown

_QWEN_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "fullatt_block_indexes": [0]}
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def _qwen(layers: int, width: int, inner: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    """Build a Qwen2.5-VL text model with a stub for the vision tower, so that all time is the text model's."""
    return {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [width // heads // 2 - 2 * (3 * width // heads // 16)]
                + 2 * [3 * width // heads // 16],
            },
        },
        "vision_config": {**_QWEN_TOWER, "out_hidden_size": width},
        "tie_word_embeddings": tied,
        **(_QWEN_IDS if vocabulary > 151655 else {n: i + 4 for i, n in enumerate(_QWEN_IDS)}),
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-toy": _qwen(4, 64, 128, 4, 2, 5000, True),
    "qwen2.5-vl-0.5b": _qwen(24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-vl-0.5b-untied": _qwen(24, 896, 4864, 14, 2, 151936, False),
    "qwen2.5-vl-3b": _qwen(36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-vl-7b": _qwen(28, 3584, 18944, 28, 4, 152064, False),
}


def random_model(shape: str | Path, *, dtype: torch.dtype = torch.float32, device: Any = "cpu", seed: int = 0) -> Any:
    """Build a model with random weights from the name of a built-in shape, a config.json or its folder."""
    path = Path(shape)
    if str(shape) in SHAPES:
        config = AutoConfig.for_model(**SHAPES[str(shape)])
    elif path.exists():
        try:
            config = AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = str(error).split("\n")[0].rstrip(".")
            raise RevisitError(f"{shape} is not a model configuration ({reason}).") from None
    else:
        raise unknown("shape (or path of a config.json)", str(shape), SHAPES)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def random_inputs(
    model: Any, vision_tokens: int, text_tokens: int = 32, batch: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Return a prompt with one random image of `vision_tokens` tokens in each row.

    Qwen-VL shapes get pixels; other families get a prompt of embeddings, the input of the text model.
    """
    generator = torch.Generator().manual_seed(seed)
    config, text = model.config, model.config.get_text_config()
    before, after = 4, text_tokens - 4
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        vision = config.vision_config
        merge = vision.spatial_merge_size
        high = max(h for h in range(1, math.isqrt(vision_tokens) + 1) if vision_tokens % h == 0)
        grid = torch.tensor([[1, high * merge, vision_tokens // high * merge]]).repeat(batch, 1)
        channels = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(batch * vision_tokens * merge**2, channels, generator=generator)
        words = torch.randint(20, text.vocab_size // 2, (batch, before + after), generator=generator)
        image = torch.full((batch, vision_tokens), config.image_token_id)
        ids = torch.cat([words[:, :before], image, words[:, before:]], dim=1).to(model.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels.to(model.device, model.dtype),
            "image_grid_thw": grid.to(model.device),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
    length = before + vision_tokens + after
    embeddings = torch.randn(batch, length, text.hidden_size, generator=generator).to(model.device, model.dtype)
    mask = torch.zeros(batch, length, dtype=torch.bool, device=model.device)
    mask[:, before : before + vision_tokens] = True
    return {"inputs_embeds": embeddings, "attention_mask": torch.ones_like(mask).long(), "vision_mask": mask}


@dataclass(frozen=True)
class Profile:
    """Next-token logits with plausible sets of stated sizes, in place of a random model's, which are flat.

    The set sizes, for alpha = 1e-5, are log-normal: `median`, with `spread` the standard deviation of their logarithm
    (0 makes every step alike), at most `largest`. Logits are a word-frequency prior, −`zipf`·ln(rank + 2.7), plus new Gumbel
    noise at each step, scaled so that the step has its size. So frequent tokens recur and rare ones are new: with the default
    exponent, 83 % of the 64 best and 85 % of the 512 best tokens of a step were among the best of an earlier one, over 200
    steps, compared with 77 % and 88 % for SmolLM2-135M-Instruct describing a scene.
    """

    median: int = 64
    spread: float = 1.3
    largest: int = 8000
    zipf: float = 1.5
    steps: int = 200
    seed: int = 0
    made: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    ALPHA: ClassVar[float] = 1e-5

    def sizes(self) -> list[int]:
        """Return the size of the plausible set at each step."""
        quantiles = (torch.arange(self.steps, dtype=torch.float64) + 0.5) / self.steps
        normal = torch.special.ndtri(quantiles)[
            torch.randperm(self.steps, generator=torch.Generator().manual_seed(self.seed))
        ]
        return [max(1, min(self.largest, round(self.median * math.exp(self.spread * z)))) for z in normal.tolist()]

    def logits(self, vocabulary: int) -> Tensor:
        """Return the logits of all steps, computed once.  -> (steps, V)"""
        if vocabulary not in self.made:
            generator = torch.Generator().manual_seed(self.seed)
            rank = torch.randperm(vocabulary, generator=generator)
            prior = -self.zipf * torch.log(rank + 2.7)
            rows = []
            for size in self.sizes():
                noise = -torch.log(-torch.log(torch.rand(vocabulary, generator=generator).clamp(1e-9, 1 - 1e-7)))
                words = prior + noise
                size = min(size, vocabulary - 1)
                top = words.topk(size + 1).values
                edge = 0.5 * (top[-1] + top[-2])
                rows.append((words - top[0]) * (-math.log(self.ALPHA) / (top[0] - edge)))
            self.made[vocabulary] = torch.stack(rows)
        return self.made[vocabulary]

    def at(self, step: int, like: Tensor) -> Tensor:
        """Return logits of one step in the shape of the model's; rows of a batch are at different steps.  -> (B, V)"""
        table = self.logits(like.shape[-1])
        if table.device != like.device:
            table = self.made[like.shape[-1]] = table.to(like.device)
        return torch.stack([table[(step + 37 * row) % self.steps] for row in range(len(like))])

    def describe(self) -> str:
        """Describe the profile, with its actual quantiles."""
        sizes = sorted(self.sizes())
        cuts = "/".join(str(sizes[min(len(sizes) - 1, int(q * len(sizes)))]) for q in (0.1, 0.5, 0.9, 1.0))
        return (
            f"plausible-set sizes at alpha {self.ALPHA:g}: 10 % / median / 90 % / largest = {cuts} over {self.steps} steps; "
            f"tokens drawn by word frequency (Zipf exponent {self.zipf:g})"
        )
