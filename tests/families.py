"""Tiny random models of every supported family, with real processors, built from families.yaml.

`build(family)` returns (model, processor); everything is seeded, float32 and small enough to decode in milliseconds.
The logits are sharpened so that plausible sets are neither one token nor the whole vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from revisit.models.processors import images_only

SPECIAL = """<pad> <s> </s> <image> <video> <|im_start|> <|im_end|> <|image_pad|> <|video_pad|> <|vision_start|> <|vision_end|>
    <|image|> <|video|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <img> </img> <IMG_CONTEXT>
    <fake_token_around_image> <global-img> <end_of_utterance> <start_of_image> <end_of_image> <image_soft_token> [IMG]
    [IMG_BREAK] [IMG_END] <|START_OF_IMG|> <|END_OF_IMG|> <|IMG_PATCH|> <|IMG_LINE_BREAK|> TILE TILE_GLOBAL""".split()  # noqa: SIM905
SPECIAL += [f"TILE_{i}" for i in range(1, 13)]
SPECIAL += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
# Behind the alphabet, so that models whose outputs are recorded keep their token ids.
ADDED = """<|audio|> <|image> <image|> <IMG_START> <IMG_ATOM> <IMG_GRID> <IMG_COL> <IMG_ROW> <IMG_END> <|image_start|>
    <|image_end|> <|img_thumbnail|> <|patch|> <|tile_x_separator|> <|tile_y_separator|>""".split()  # noqa: SIM905
ADDED += [f"<|img_row_{r}_col_{c}|>" for r in range(1, 5) for c in range(1, 5)]
ADDED += """<im_patch> <im_col> <im_start> <low_res_im_start> <im_end> <frame_start> <frame_end> <im_low> <slice> </slice>
    <image_id> </image_id> </image> <|media_begin|> <|media_content|> <|media_pad|> <|media_end|>""".split()  # noqa: SIM905
VOCAB = 512


def tokenizer(**named: str) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with the special tokens of all families' processors."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *ADDED])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([*SPECIAL, *ADDED])
    tok = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=named,
        padding_side="left",
    )
    assert len(tok) <= VOCAB
    return tok


def token_id(token: str) -> int:
    alphabet = len(pre_tokenizers.ByteLevel.alphabet())
    return SPECIAL.index(token) if token in SPECIAL else len(SPECIAL) + alphabet + ADDED.index(token)


TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
TEXT: dict[str, Any] = TABLE["bases"]["text"]


def with_ids(node: Any) -> Any:
    """Replace "@token" by the token's id."""
    if isinstance(node, dict):
        return {name: with_ids(value) for name, value in node.items()}
    if isinstance(node, list):
        return [with_ids(value) for value in node]
    return token_id(node[1:]) if isinstance(node, str) and node.startswith("@") else node


class PixtralByHand:
    """Does what PixtralProcessor does to images and text; the class itself needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, patch: int) -> None:
        self.image_processor, self.tokenizer, self.patch = image_processor, tokenizer, patch

    def __call__(self, text: list[str], images: list[list[Image.Image]], **kwargs: Any) -> Any:
        flat = [image for own in images for image in own]
        out = self.image_processor(images=flat, return_tensors="pt")
        sizes = iter(out["image_sizes"].tolist() if hasattr(out["image_sizes"], "tolist") else out["image_sizes"])

        def grid(_match: re.Match[str]) -> str:
            height, width = next(sizes)
            return "[IMG_BREAK]".join(["[IMG]" * (width // self.patch)] * (height // self.patch)) + "[IMG_END]"

        texts = [re.sub(r"\[IMG\]", grid, prompt) for prompt in text]
        encoded = self.tokenizer(texts, padding=True, return_tensors="pt")
        encoded.update({"pixel_values": out["pixel_values"], "image_sizes": torch.as_tensor(out["image_sizes"])})
        return encoded


def config(family: str) -> Any:
    """Make the configuration of a family's tiny model."""
    entry = TABLE["families"][family]
    return getattr(transformers, f"{entry['model']}Config")(**with_ids(entry["config"]))


def part(entry: dict[str, Any]) -> Any:
    """Make a part of a processor."""
    return getattr(transformers, entry["class"])(**{name: value for name, value in entry.items() if name != "class"})


def make(family: str) -> tuple[Any, Any]:
    """Make a tiny random model and its processor."""
    model = getattr(transformers, f"{TABLE['families'][family]['model']}ForConditionalGeneration")(config(family))
    return model, processor(TABLE["families"][family])


def processor(entry: dict[str, Any]) -> Any:
    """Make a processor; its video processor needs torchvision and may be left out."""
    settings = dict(entry["processor"])
    name = settings.pop("class")
    cls = PixtralByHand if name == "PixtralByHand" else getattr(transformers, name)
    parts = {"image_processor": part(entry["images"]), "tokenizer": tokenizer(**entry.get("tokens", {}))}
    if "videos" in entry:
        videos = entry["videos"] if importlib.util.find_spec("torchvision") else None
        parts["video_processor"] = None if videos is None else part(videos)
        cls = images_only(cls) if videos is None else cls
    if "features" in entry:
        parts["feature_extractor"] = part(entry["features"])
    return cls(**parts, **settings)


def llava() -> tuple[Any, Any]:
    """Make LLaVA's tiny model and processor, for tests that change them."""
    return make("llava")


PLACEHOLDER = {family: entry["place"] for family, entry in TABLE["families"].items()}  # marks one image in a prompt
TORCHVISION = {"cohere2_vision", "kimi_k25", "lfm2_vl", "llama4", "minicpmv4_6", "molmo2", "perception_lm"}
RECURRENT = ("lfm2_vl", "minicpmv4_6", "qwen3_5", "qwen3_5_moe")  # only some of their decoder layers attend
ALL = tuple(PLACEHOLDER)
if Version(transformers.__version__) < Version("5.22"):
    TORCHVISION.add("gemma4")  # older versions import torchvision with its processor
FAMILIES = ALL if importlib.util.find_spec("torchvision") else tuple(name for name in ALL if name not in TORCHVISION)


@functools.cache
def build(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Build a tiny random model of the family and its processor; cached, so tests must not change them."""
    torch.manual_seed(seed)
    model, processor = make(family)
    return sharpen(model), processor


def sharpen(model: Any) -> Any:
    """Spread the logits of a random model over several nats, and make its images matter."""
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # with the default initialization, images hardly matter
                if not parameter.any():
                    parameter.normal_(0, 0.3)  # Gemma3's projector starts at zero: images would not matter
        model.get_output_embeddings().weight.normal_(0, 0.5)  # spreads the logits over several nats
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    model.generation_config.bos_token_id = 1
    return model


def image(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    """Make an image of random coarse blocks, so that places differ."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


def inputs(family: str, prompts: list[str], images: list[list[Image.Image]]) -> Any:
    """Make left-padded inputs, each prompt after its own images."""
    _, processor = build(family)
    texts = [PLACEHOLDER[family] * len(own) + prompt for prompt, own in zip(prompts, images, strict=True)]
    made = processor(text=texts, images=[list(own) for own in images], padding=True, return_tensors="pt")
    return wide(made)


def wide(inputs: Any) -> Any:
    """Convert the pixels to float32; Llama 4's processor returns bfloat16."""
    inputs["pixel_values"] = inputs["pixel_values"].float()
    return inputs


TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% elif c['type'] == 'video' %}VIDEO{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def save(family: str, folder: Path) -> Path:
    """Write a model folder as on the Hub, without the processor's own save_pretrained."""
    model, processor = build(family)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    own = {"processor_class": type(processor).__name__}
    for name in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "image_seq_length"):
        if isinstance(getattr(processor, name, None), (int, str)):
            own[name] = getattr(processor, name)
    for name in ("image_seq_len", "num_image_tokens"):
        if hasattr(processor, name):
            own[name] = getattr(processor, name)
    (folder / "processor_config.json").write_text(json.dumps(own))
    if getattr(processor, "video_processor", None) is not None:
        processor.video_processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template(family))
    return folder


def template(family: str) -> str:
    """Return the family's chat template."""
    return TEMPLATE.replace("PLACE", PLACEHOLDER[family]).replace(
        "VIDEO", TABLE["families"][family].get("video_place", "")
    )
