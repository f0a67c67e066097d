"""Compare patch maps with the models: paint one bright patch, run image processor and vision tower, and find the token.

Attention inside the vision towers is set to zero, so that a patch changes only its own vision token.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import families
from revisit.models.geometry import Layout, layout
from revisit.models.parts import ModelParts, vision_mask
from revisit.models.patch_maps import Box

ATTENTION_OUTPUTS = ("out_proj", "o_proj", "attn.proj", "projection_layer")
Size = tuple[int, int]


def silence(model: Any) -> Any:
    """Zero the attention outputs of the vision tower."""
    with torch.no_grad():
        for name, module in model.named_modules():
            inside = any(part in name for part in ("vision", "visual"))
            if inside and name.endswith(ATTENTION_OUTPUTS) and isinstance(module, torch.nn.Linear):
                module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
    return model


def resized(family: str, vision: dict[str, Any], processor: Any, **config: Any) -> tuple[Any, Any]:
    """Build a family's tiny model with a vision tower of the published proportions."""
    torch.manual_seed(0)
    model, _ = families.build(family)
    settings = copy.deepcopy(model.config)
    for key, value in vision.items():
        setattr(settings.vision_config, key, value)
    for key, value in config.items():
        setattr(settings, key, value)
    settings.get_text_config().num_hidden_layers = 1
    if getattr(settings.get_text_config(), "layer_types", None):
        settings.get_text_config().layer_types = settings.get_text_config().layer_types[:1]
    built = type(model)(settings).float().eval()
    for name, parameter in built.named_parameters():
        if "projection" in name and not parameter.any():
            torch.nn.init.normal_(parameter)  # Gemma3's projector starts at zero
    return silence(built), processor


CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
PATCHES = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _llava(**kwargs: Any) -> tuple[Any, Any]:
    images = transformers.LlavaImageProcessorPil(**CLIP, **kwargs)
    processor = transformers.LlavaProcessor(images, families.tokenizer(), **PATCHES)
    return resized("llava", {"image_size": 336, "patch_size": 14}, processor)


def _llava_next() -> tuple[Any, Any]:
    points = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    images = transformers.LlavaNextImageProcessorPil(**CLIP, image_grid_pinpoints=points)
    processor = transformers.LlavaNextProcessor(images, families.tokenizer(), **PATCHES)
    return resized("llava_next", {"image_size": 336, "patch_size": 14}, processor, image_grid_pinpoints=points)


def _llava_onevision(ratio: str = "anyres_max_9") -> tuple[Any, Any]:
    sides = range(384, 2305, 384)
    points = [[height, width] for height in sides for width in sides]
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 384, "width": 384}, image_grid_pinpoints=points
    )
    processor = families.images_only(transformers.LlavaOnevisionProcessor)(
        images,
        families.tokenizer(),
        None,
        num_image_tokens=27 * 27,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=ratio,
    )
    vision = {"image_size": 384, "patch_size": 14}
    more = {"image_grid_pinpoints": points, "vision_aspect_ratio": ratio}
    return resized("llava_onevision", vision, processor, **more)


def _qwen2_5_vl() -> tuple[Any, Any]:
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 56 * 56, "longest_edge": 700 * 700}
    )
    processor = families.images_only(transformers.Qwen2_5_VLProcessor)(images, families.tokenizer(), None)
    return resized("qwen2_5_vl", {"patch_size": 14, "window_size": 112}, processor)


def _internvl() -> tuple[Any, Any]:
    tok = families.build("internvl")[1].tokenizer
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = families.images_only(transformers.InternVLProcessor)(images, tok, None, image_seq_length=256)
    return resized("internvl", {"image_size": [448, 448], "patch_size": [14, 14]}, processor, image_seq_length=256)


def _smolvlm() -> tuple[Any, Any]:
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 2 * 364}, max_image_size={"longest_edge": 364})
    processor = families.images_only(transformers.SmolVLMProcessor)(
        images, families.tokenizer(), None, image_seq_len=169
    )
    return resized("smolvlm", {"image_size": 364, "patch_size": 14}, processor)


BUILT = {
    "llava": _llava,
    "llava padded to a square": lambda: _llava(do_pad=True),
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "llava_onevision interpolated": lambda: _llava_onevision("anyres_max_2"),
    "qwen2_5_vl": _qwen2_5_vl,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
}


@functools.cache
def case(name: str) -> tuple[Any, Any]:
    if name in BUILT:
        return BUILT[name]()
    model, processor = families.build(name)
    return silence(copy.deepcopy(model)), processor


class Enough(Exception):
    """Raised to stop the model after its vision tower."""


def states(name: str, images: list[Image.Image]) -> tuple[torch.Tensor, Any]:
    """Return the decoder's input at the vision positions (N, d), and the processor's output."""
    model, processor = case(name)
    family = name.split()[0]
    texts = [families.PLACEHOLDER.get(family, "<image>") * len(images) + "hi"]
    inputs = families.wide(processor(text=texts, images=[images], return_tensors="pt"))
    parts = ModelParts.of(model)
    mask = vision_mask(inputs["input_ids"], parts.vision_ids)[0]
    seen: list[torch.Tensor] = []

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0][mask])
        raise Enough

    handle = parts.layers[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad(), pytest.raises(Enough):
            model(**{k: v for k, v in inputs.items() if k != "labels"}, logits_to_keep=1)
    finally:
        handle.remove()
    return seen[0], inputs


@functools.cache
def dark(name: str, size: Size, count: int = 1) -> tuple[torch.Tensor, Layout]:
    """Return the vision states of black images, and the layout under test."""
    base, inputs = states(name, [Image.new("RGB", size)] * count)
    model, processor = case(name)
    return base, layout(model.config, processor.image_processor, [size] * count, len(base), inputs)


def painted(size: Size, box: Box) -> Image.Image:
    """Make a black image with one bright patch."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    x0, y0, x1, y1 = (round(v) for v in box)
    pixels[y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)] = 255
    return Image.fromarray(pixels)


def shrink(box: Box, to: float) -> Box:
    x0, y0, x1, y1 = box
    x, y, w, h = (x0 + x1) / 2, (y0 + y1) / 2, (x1 - x0) * to / 2, (y1 - y0) * to / 2
    return x - w, y - h, x + w, y + h


def changes(name: str, size: Size, box: Box, image: int = 0, count: int = 1) -> Any:
    """Return the change of each vision token's state when the patch is painted."""
    images = [Image.new("RGB", size)] * count
    images[image] = painted(size, box)
    return (states(name, images)[0] - dark(name, size, count)[0]).norm(dim=-1)


def overlap(box: Box, patch: Box) -> float:
    """Return the area that two boxes share."""
    width, height = (max(0.0, min(box[i + 2], patch[i + 2]) - max(box[i], patch[i])) for i in (0, 1))
    return width * height


def brightest_per_view(change: torch.Tensor, found: Layout, image: int = 0) -> list[int]:
    """Return the token with the largest change in each view (thumbnail, tiles) of an image."""
    views: dict[str, list[int]] = {}
    for grid in found.grids:
        if grid.image == image:
            own = [i for i in range(grid.first, grid.first + grid.tokens) if grid.cell(i) is not None]
            views.setdefault(grid.view, []).extend(own)
    return [max(own, key=lambda i: float(change[i])) for own in views.values()]


SIZES: dict[str, list[Size]] = {
    "llava": [(640, 427), (300, 500), (336, 336)],
    "llava padded to a square": [(640, 427), (300, 500)],
    "llava_next": [(640, 427), (300, 900), (500, 500)],
    "llava_onevision": [(640, 427), (500, 800)],
    "llava_onevision interpolated": [(640, 427)],
    "qwen2_5_vl": [(640, 427), (200, 700)],
    "internvl": [(640, 427), (400, 1200), (448, 448)],
    "smolvlm": [(640, 427), (300, 700)],
    "vipllava": [(80, 60)],
    "qwen2_vl": [(120, 60)],
    "qwen3_vl": [(60, 120)],
    "idefics3": [(120, 60), (50, 50)],
    "paligemma": [(90, 60)],
    "gemma3": [(90, 60)],
    "mistral3": [(120, 60)],
    "aya_vision": [(120, 60), (90, 90)],
    "glm4v": [(120, 60)],
    "deepseek_vl": [(90, 60), (60, 120)],
    "qwen3_5": [(120, 60)],
    "qwen3_5_moe": [(60, 120)],
    "qwen3_vl_moe": [(60, 120)],
    "glm46v": [(120, 60)],
    "glm4v_moe": [(60, 120)],
    "gemma4": [(120, 60), (60, 90)],
}
if families.FAMILIES == families.ALL:
    SIZES["cohere2_vision"] = [(120, 60), (90, 90)]
CASES = [
    (name, size) for name, sizes in SIZES.items() if name != "gemma4" or name in families.FAMILIES for size in sizes
]


@pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{n}-{w}x{h}" for n, (w, h) in CASES])
def test_vision_tokens_are_located_on_the_image(name: str, size: Size) -> None:
    width, height = size
    _, found = dark(name, size)
    assert found.reason == ""
    # A patch at a fixed place: in every view, the token that changes most covers it.
    for across, down in ((0.31, 0.42), (0.73, 0.58)):
        side = max(2, min(size) // 40)
        x, y = round(width * across), round(height * down)
        patch = (x, y, x + side, y + side)
        change = changes(name, size, patch)
        for token in brightest_per_view(change, found):
            region = found.region(token)
            assert region is not None
            assert overlap(region.box, patch) > 0, (token, region, patch)  # only partly if the patch crosses an edge
    # A patch inside the region of a corner or inner token of the first, a middle and the last grid: that token changes most.
    chosen = {0, len(found.grids) // 2, len(found.grids) - 1}
    for grid in [found.grids[i] for i in sorted(chosen)]:
        cells = [(grid.rows // 3, 2 * grid.columns // 3), (grid.rows - 1, 0)]
        for row, column in cells if len(found.grids) < 3 else cells[:1]:
            token = grid.first + row * (grid.columns + grid.gap) + column
            region = found.region(token)
            if region is None:
                continue  # padding only
            change = changes(name, size, shrink(region.box, 0.5))
            own = [i for i in range(grid.first, grid.first + grid.tokens) if grid.cell(i) is not None]
            assert max(own, key=lambda i: float(change[i])) == token


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_5_vl", "internvl", "smolvlm", "llava_onevision"])
def test_the_second_of_two_images(name: str) -> None:
    size, patch = (640, 427), (300, 200, 330, 230)
    _, found = dark(name, size, 2)
    assert found.reason == ""
    change = changes(name, size, patch, image=1, count=2)
    for token in brightest_per_view(change, found, image=1):
        region = found.region(token)
        assert region is not None
        assert region.image == 1
        assert overlap(region.box, patch) > 0
    assert found.region(int(change.argmax())).image == 1  # type: ignore[union-attr]


def test_llava_regions_by_hand() -> None:
    """640 × 480 to 448 × 336 (scale 0.7), of which columns 56..392 are kept: 14 seen pixels are 20 original ones."""
    model, processor = case("llava")
    found = layout(model.config, processor.image_processor, [(640, 480)], 576)
    assert found.region(0).box == pytest.approx((80, 0, 100, 20))  # type: ignore[union-attr]
    assert found.region(25).box == pytest.approx((100, 20, 120, 40))  # type: ignore[union-attr]
    assert found.region(575).box == pytest.approx((540, 460, 560, 480))  # type: ignore[union-attr]
    assert found.region(576) is None


def test_padding_and_line_breaks_have_no_region() -> None:
    model, processor = case("llava padded to a square")
    found = layout(model.config, processor.image_processor, [(600, 100)], 576)
    assert found.region(0) is None  # the bar above the image
    assert found.region(12 * 24) is not None
    model, processor = case("llava_next")
    tokens = len(dark("llava_next", (500, 500))[0])
    found = layout(model.config, processor.image_processor, [(500, 500)], tokens)
    assert tokens == 576 + 48 * 49
    assert found.region(576 + 48) is None
    assert found.region(576 + 49).box == pytest.approx((0, 500 / 48, 500 / 48, 1000 / 48))  # type: ignore[union-attr]


def test_layouts_without_grids_state_the_reason() -> None:
    model, processor = case("llava")
    wrong = layout(model.config, processor.image_processor, [(640, 480)], 100)
    assert wrong.grids == ()
    assert "576 or 577" in wrong.reason
    assert "100" in wrong.reason
    assert wrong.region(3) is None
    assert "learned queries" in layout(transformers.Idefics2Config(), None, [(64, 64)], 32).reason
    assert "chameleon" in layout(transformers.ChameleonConfig(), None, [(64, 64)], 32).reason
