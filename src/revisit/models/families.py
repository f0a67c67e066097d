"""The table of model families: a new family is one entry of `FAMILIES`.

Most of a model is found from what it declares (see `parts`), so unlisted families work too. An entry adds what models do not
declare: where vision tokens are on the image, the tokens around an image and a thought, the layers the paper recommends, the class in vLLM.
Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from revisit.errors import RevisitError
from revisit.models import patch_maps as maps
from revisit.models.patch_maps import PatchMap
from revisit.models.types import Tokenizer

# Names that families use for the same thing.
VISION_TOKEN_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # in configurations
VISION_TOKENS = ("image_token", "video_token", "boi_token", "fake_image_token")  # in processors
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")  # in decoders
CROSS_ATTENTION = (
    "cross_attention_layers",
    "cross_layer_interval",
)  # in configurations of models that read images by cross-attention
BLOCKS_OF_LAYERS = (
    "n_layers_per_attn_res_block"  # in configurations of decoders whose head reads a mixture of layer blocks
)
LANGUAGE_MODELS = ("language_model", "text_model")  # in models that do not declare their LM head
MLPS = ("mlp", "feed_forward", "ffn")  # in decoder layers
NORMS_BEFORE_MLP = (
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "input_layernorm",
)  # the first one that a layer has
NORMS_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")  # if it has one
LOGIT_FACTORS = {"logit_scale": 1, "output_multiplier": 1, "logits_scaling": -1, "logits_mup_width_multiplier": -1}
LOGIT_CAP = "final_logit_softcapping"
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches")  # inputs of models
IMAGE_INPUTS = (*PIXELS, "mm_encoder_outputs")  # pixels, or the output of the vision tower
# Pixel input of families that pack the patches of all images -> the input with the number of patches of each.
PACKED = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


@dataclass(frozen=True)
class Family:
    """One model family, named by `model_type` in its configurations."""

    model_type: str
    title: str = ""  # names of its models; empty unless the tests decode a tiny model of it with its real processor
    unsupported: str = ""  # why it cannot be decoded, if its configuration does not show that
    layers: str = "last"  # what the paper recommends
    patch_map: PatchMap | None = None
    learned_queries: bool = False  # its vision tokens are not patches
    image_edges: tuple[str, ...] | None = None  # tokens around and within an image; None: unknown
    sid_share: float = 0.1  # published share of the vision tokens that SID keeps
    vllm: str = ""  # the architecture in vLLM without "ForConditionalGeneration", if the plug-in supports it
    thought: tuple[str, str] = ("<think>", "</think>")  # tokens around a thought, if the tokenizer has them
    attends_ahead: bool = False  # positions of an image attend to later ones, so that a prompt runs in one forward
    needs: str = ""  # a package that its processor imports and this package does not install
    prefixing_processor: str = ""  # the processor class, if it inserts the images before the text itself
    native_suffix: str = ""  # suffix of native checkpoints, if this type needs code from its repository

    @property
    def no_patch_map(self) -> str:
        """The reason why there is no patch map."""
        if self.learned_queries:
            return f"{self.model_type} reads an image through a fixed set of learned queries, which have no position on the image."
        return f"the positions of vision tokens on the image are unknown for {self.model_type} models."


_EMBEDDED = "passes its prompt to a language model as embeddings, in which nothing marks the image"
_MASKED = "marks the image in its prompt by an input of its own, not by a token"

_QWEN_EDGES = ("<|vision_start|>", "<|vision_end|>")
_OMNI_EDGES = ("<|vision_bos|>", "<|vision_eos|>", *_QWEN_EDGES)
_GLM_EDGES = ("<|begin_of_image|>", "<|end_of_image|>")
_GEMMA_EDGES = ("<start_of_image>", "<end_of_image>")
_GEMMA4_THOUGHT = ("<|channel>", "<channel|>")
_OVIS_EDGES = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
_AYA_EDGES = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", *(f"TILE_{n}" for n in range(1, 13)))
_COHERE_EDGES = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>")
_KIMI_EDGES = ("<|media_begin|>", "image", "<|media_content|>", "<|media_end|>")
_LFM_EDGES = (
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
)
_LLAMA_EDGES = ("<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
_MOLMO_EDGES = ("<im_start>", "<low_res_im_start>", "<im_end>", "<im_col>")
_SPLIT_EDGES = (  # tiles in rows, with line breaks between the rows
    *("<fake_token_around_image>", "<global-img>", "\n", "\n\n"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)

_qwen = partial(Family, layers="all", patch_map=maps.merged, image_edges=_QWEN_EDGES)
_newer = partial(Family, needs="torchvision")
_omni = partial(Family, layers="all", patch_map=maps.merged, image_edges=_OMNI_EDGES, needs="torchvision")

FAMILIES = {
    family.model_type: family
    for family in (
        Family("aya_vision", "Aya Vision", patch_map=maps.tiles, image_edges=_AYA_EDGES),
        Family("aria", learned_queries=True),
        Family("blip", unsupported="reads images by cross-attention"),
        Family("blip-2", unsupported=_EMBEDDED),
        _newer(
            "cohere2_vision",
            "Command A Vision",
            patch_map=maps.tiles,
            image_edges=_COHERE_EDGES,
            thought=("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        Family("deepseek_ocr2", learned_queries=True),
        Family("deepseek_vl", "DeepSeek-VL", patch_map=maps.padded_square, image_edges=()),
        Family("diffusion_gemma", unsupported="writes text by diffusion, not token by token"),
        Family("dots3_note", patch_map=maps.merged),
        Family("evolla", unsupported="reads proteins, not images"),
        Family(
            "gemma3",
            "Gemma 3",
            patch_map=maps.pan_and_scan,
            vllm="Gemma3",
            attends_ahead=True,
            image_edges=_GEMMA_EDGES,
        ),
        Family(
            "gemma4",
            "Gemma 4",
            patch_map=maps.pooled,
            vllm="Gemma4",
            attends_ahead=True,
            image_edges=("<|image>", "<image|>"),
            thought=_GEMMA4_THOUGHT,
        ),
        Family("gemma4_unified", attends_ahead=True, thought=_GEMMA4_THOUGHT),
        Family("git", unsupported="puts the image before the text without a token for it"),
        Family("glm46v", "GLM-4.6V", patch_map=maps.merged, image_edges=_GLM_EDGES),
        Family("glm4v", "GLM-4.1V", patch_map=maps.merged, image_edges=_GLM_EDGES, vllm="Glm4v"),
        Family("glm4v_moe", "GLM-4.5V", patch_map=maps.merged, image_edges=_GLM_EDGES, vllm="Glm4vMoe"),
        Family("idefics2", learned_queries=True),
        Family("idefics3", "Idefics 3", patch_map=maps.splits, vllm="Idefics3", image_edges=_SPLIT_EDGES),
        Family("instructblip", unsupported=_EMBEDDED),
        Family("instructblipvideo", unsupported=_EMBEDDED),
        Family("internvl", "InternVL 3, 3.5", patch_map=maps.tiles, vllm="InternVL", image_edges=("<img>", "</img>")),
        Family("internvl_chat", native_suffix="-hf"),
        Family("kosmos-2", unsupported=_MASKED),
        Family("kosmos-2.5", unsupported=_MASKED),
        _newer("kimi_k25", "Kimi K2.5", patch_map=maps.padded_patches, image_edges=_KIMI_EDGES),
        _newer("lfm2_vl", "LFM2-VL", patch_map=maps.large_tiles, image_edges=_LFM_EDGES),
        Family("lfm3_vl", patch_map=maps.merged),
        _newer("llama4", "Llama 4", patch_map=maps.scaled_tiles, image_edges=_LLAMA_EDGES),
        Family("llava", "LLaVA 1.5", patch_map=maps.llava, sid_share=100 / 576, vllm="Llava", image_edges=()),
        Family("llava_next", "LLaVA-NeXT", patch_map=maps.llava_next, vllm="LlavaNext", image_edges=()),
        Family("llava_next_video", patch_map=maps.llava_next, image_edges=()),
        Family(
            "llava_onevision", "LLaVA-OneVision", patch_map=maps.llava_onevision, vllm="LlavaOnevision", image_edges=()
        ),
        _newer("minicpmv4_6", "MiniCPM-V 4.6", patch_map=maps.slices, vllm="MiniCPMV4_6"),
        Family(
            "mistral3",
            "Mistral 3, Pixtral",
            patch_map=maps.native,
            vllm="Mistral3",
            needs="torchvision",
            image_edges=("[IMG_BREAK]", "[IMG_END]"),
            thought=("[THINK]", "[/THINK]"),
        ),
        _newer("molmo2", "Molmo 2", patch_map=maps.overlapping_crops, image_edges=_MOLMO_EDGES, attends_ahead=True),
        Family("ovis2", "Ovis2", patch_map=maps.covering_tiles, image_edges=_OVIS_EDGES),
        _newer("perception_lm", "Perception LM", patch_map=maps.stretched_tiles, image_edges=()),
        Family("pi0", unsupported="writes a robot's actions, not text"),
        Family(
            "paligemma",
            "PaliGemma",
            patch_map=maps.square,
            prefixing_processor="PaliGemmaProcessor",
            image_edges=(),
            attends_ahead=True,
        ),
        _omni("qwen2_5_omni_thinker"),
        _qwen("qwen2_5_vl", "Qwen2.5-VL", vllm="Qwen2_5_VL"),
        _qwen("qwen2_vl", "Qwen2-VL", vllm="Qwen2VL"),
        _qwen("qwen3_5", "Qwen3.5, 3.6", vllm="Qwen3_5"),
        _qwen("qwen3_5_moe", "Qwen3.5, 3.6 (MoE)", vllm="Qwen3_5Moe"),
        _omni("qwen3_omni_moe_thinker"),
        _qwen("qwen3_vl", "Qwen3-VL", vllm="Qwen3VL"),
        _qwen("qwen3_vl_moe", "Qwen3-VL (MoE)", vllm="Qwen3VLMoe"),
        Family("shieldgemma2", patch_map=maps.pan_and_scan, image_edges=_GEMMA_EDGES, attends_ahead=True),
        Family("smolvlm", "SmolVLM", patch_map=maps.splits, image_edges=_SPLIT_EDGES, vllm="SmolVLM"),
        Family("vipllava", "ViP-LLaVA", patch_map=maps.llava, sid_share=100 / 576, image_edges=()),
    )
}


def of(model_type: str) -> Family:
    """Return the entry of a model type. Unlisted types get an empty entry."""
    return FAMILIES.get(model_type) or Family(model_type)


def tested() -> list[Family]:
    """List the families that the tests decode."""
    return [family for family in FAMILIES.values() if family.title]


def edge_ids(tokenizer: Tokenizer, family: Family | None = None) -> set[int]:
    """Return the ids of the tokens around an image: those of one family, or of all."""
    listed = [family] if family else FAMILIES.values()
    texts = {text for entry in listed for text in entry.image_edges or () if family or text.strip()}
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in sorted(texts)]
    return {int(ids[0]) for ids in encoded if len(ids) == 1}


def vllm_architectures() -> set[str]:
    """Return the architectures that the vLLM plug-in supports."""
    return {f"{family.vllm}ForConditionalGeneration" for family in FAMILIES.values() if family.vllm}


def prefixes_images(processor: object) -> bool:
    """Return whether a processor inserts the images itself, so that texts contain no placeholder."""
    return any(type(processor).__name__ == family.prefixing_processor for family in FAMILIES.values())


LAYER_SETS = ("last", "all", "low", "high")


def resolve_layers(spec: str | Sequence[int], depth: int, tied: bool) -> tuple[int, ...]:
    """Return ascending hidden-state indices for "last", "all", "low", "high" or a list; the final layer is `depth`.

    "all" means the even layers, without the embedding if the head is tied to it (it would just repeat its input).
    """
    start = 0 if not tied or depth < 2 else (2 if depth > 2 else 1)
    if isinstance(spec, str):
        chosen: list[int] = []
        if spec == "all":
            chosen = list(range(start, depth, 2))
        elif spec == "low":
            stop = depth // 2 if depth <= 40 else 20
            chosen = list(range(start, stop, 2)) or [start]
        elif spec == "high":
            chosen = list(range(depth // 2 if depth <= 40 else depth - 20, depth, 2))
        return tuple(sorted({*chosen, depth}))
    missing = [layer for layer in spec if not 0 <= layer <= depth]
    if missing:
        raise RevisitError(
            f"Layer {missing[0]} does not exist: this model's hidden states are numbered 0 (projector output) to "
            f"{depth} (final); choose layers in that range."
        )
    return tuple(sorted(set(spec)))
