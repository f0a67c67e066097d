"""The table of model families: a new family is one entry of data/families.yaml.

Most parts of a model are found in its configuration and modules (see `parts`), so unlisted families work too. An entry adds the
rest: the positions of vision tokens on the image, the tokens around an image and a thought, the layers that the paper recommends,
the class in vLLM. Nothing heavy is imported here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence, Set
from importlib import resources
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import yaml
from pydantic import ConfigDict

from revisit.errors import RevisitError, unknown
from revisit.models.patch_maps import PATCH_MAPS, PatchMap
from revisit.models.types import Tokenizer
from revisit.registry import Settings

# Names that families use for the same thing.
VISION_TOKEN_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # in configurations
VISION_TOKENS = ("image_token", "video_token", "boi_token", "fake_image_token")  # in processors
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")  # in decoders
# In configurations of models that read images by cross-attention, and of decoders whose head reads a mixture of layer blocks.
CROSS_ATTENTION = ("cross_attention_layers", "cross_layer_interval")
BLOCKS_OF_LAYERS = "n_layers_per_attn_res_block"
LANGUAGE_MODELS = ("language_model", "text_model")  # in models that do not declare their LM head
MLPS = ("mlp", "feed_forward", "ffn")  # in decoder layers
# The first one that a layer has.
NORMS_BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm", "input_layernorm")
NORMS_AFTER_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")  # if it has one
LOGIT_FACTORS = {"logit_scale": 1, "output_multiplier": 1, "logits_scaling": -1, "logits_mup_width_multiplier": -1}
LOGIT_CAP = "final_logit_softcapping"
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches")  # inputs of models
IMAGE_INPUTS = (*PIXELS, "mm_encoder_outputs")  # pixels, or the output of the vision tower
# Pixel input of families that pack the patches of all images -> the input with the number of patches of each.
PACKED = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}

LayerSet: TypeAlias = Literal["last", "all", "low", "high"]
LAYER_SETS: tuple[str, ...] = get_args(LayerSet)


class Family(Settings):
    """One model family, named by `model_type` in its configurations."""

    model_config = ConfigDict(protected_namespaces=())  # before 2.10, pydantic reserves names with model_

    model_type: str
    title: str = ""  # names of its models; empty unless the tests decode a tiny model of it with its real processor
    unsupported: str = ""  # the reason why it cannot be decoded, if its configuration does not show it
    layers: LayerSet = "last"  # recommended by the paper
    patch_map: PatchMap | None = None
    learned_queries: bool = False  # its vision tokens are not patches
    image_edges: tuple[str, ...] | None = None  # tokens around and within an image; None: unknown
    sid_share: float = 0.1  # published share of the vision tokens that SID keeps
    vllm: str = ""  # the architecture in vLLM without "ForConditionalGeneration", if the plug-in supports it
    thought: tuple[str, str] = ("<think>", "</think>")  # tokens around a thought, if the tokenizer has them
    attends_ahead: bool = False  # positions of an image attend to later ones, so a prompt cannot be run in chunks
    needs: str = ""  # a package that its processor imports and this package does not install
    prefixing_processor: str = ""  # the processor class, if it inserts the images before the text itself
    native_suffix: str = ""  # suffix of native checkpoints, if this type needs code from its repository

    @property
    def no_patch_map(self) -> str:
        """The reason why there is no patch map."""
        if self.learned_queries:
            return f"{self.model_type} reads an image through a fixed set of learned queries, which have no position on the image."
        return f"the positions of vision tokens on the image are unknown for {self.model_type} models."


def _expanded(token: str) -> list[str]:
    """Replace {n} in a token by each number from 1 to n."""
    if not (found := re.search(r"\{(\d+)\}", token)):
        return [token]
    numbers = range(1, int(found[1]) + 1)
    return [whole for number in numbers for whole in _expanded(token.replace(found[0], str(number), 1))]


_TABLE = yaml.safe_load(resources.files("revisit.models").joinpath("data/families.yaml").read_text("utf-8"))
_EDGES = {name: tuple(itertools.chain(*map(_expanded, tokens))) for name, tokens in _TABLE["edges"].items()}


def read_entry(model_type: str, entry: dict[str, Any]) -> Family:
    """Read an entry of the table, in which patch maps and the tokens around an image have names."""
    where, fields = f"families.yaml: {model_type}", {"model_type": model_type, **entry}
    named: dict[str, dict[str, Any]] = {"patch_map": PATCH_MAPS, "image_edges": _EDGES}
    for field in named.keys() & entry.keys():
        if entry[field] not in named[field]:
            raise RevisitError(f"{where}: {unknown(field, str(entry[field]), named[field])}")
        fields[field] = named[field][entry[field]]
    return Family.read(fields, where)


FAMILIES = {model_type: read_entry(model_type, entry) for model_type, entry in _TABLE["families"].items()}


def of(model_type: str) -> Family:
    """Return the entry for a model type. Unlisted types get an empty entry."""
    return FAMILIES.get(model_type) or Family(model_type=model_type)


def tested() -> list[Family]:
    """List the families that the tests decode with a tiny model."""
    return [family for family in FAMILIES.values() if family.title]


class Edges(NamedTuple):
    """The ids of the tokens around and within an image."""

    marks: Set[int] = frozenset()  # that running text is never divided into
    # That it can contain, such as line breaks between tiles; part of an image only between marks.
    words: Set[int] = frozenset()


def edges(tokenizer: Tokenizer, family: Family) -> Edges:
    """Return the tokens around and within an image in one family's prompts."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in family.image_edges or ()]
    ids = {int(tokens[0]) for tokens in encoded if len(tokens) == 1}
    special = special_ids(tokenizer)
    return Edges(ids & special, ids - special)


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the tokens that running text is never divided into: special and added ones, except blank ones."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()  # mistral-common has no such method
    return {*tokenizer.all_special_ids, *(number for token, number in added.items() if token.strip())}


def vllm_architectures() -> set[str]:
    """Return the architectures that the vLLM plug-in supports."""
    return {f"{family.vllm}ForConditionalGeneration" for family in FAMILIES.values() if family.vllm}


def prefixes_images(processor: object) -> bool:
    """Return whether a processor inserts the images itself, so that texts contain no placeholders."""
    return any(type(processor).__name__ == family.prefixing_processor for family in FAMILIES.values())


def resolve_layers(spec: str | Sequence[int], depth: int, tied: bool) -> tuple[int, ...]:
    """Return the indices of hidden states in ascending order; the final one is `depth`.

    "all" is every second layer, without the embedding if the head is tied to it (it would just repeat its input). "low" and
    "high" are every second one of the first or last half, at most 20 layers. All sets include the final one.
    """
    if isinstance(spec, str):
        if spec not in LAYER_SETS:
            raise RevisitError(f"layers must be {', '.join(LAYER_SETS)} or numbers, not {spec!r}.")
        first = max(0, min(2, depth - 1)) if tied else 0
        ranges = {
            "last": range(0),
            "all": range(first, depth, 2),
            "low": range(first, max(min(depth // 2, 20), first + 1), 2),
            "high": range(max(depth // 2, depth - 20), depth, 2),
        }
        return tuple(sorted({*ranges[spec], depth}))
    missing = [layer for layer in spec if not 0 <= layer <= depth]
    if missing:
        raise RevisitError(
            f"Layer {missing[0]} does not exist: this model's hidden states are numbered 0 (projector output) to "
            f"{depth} (final); choose layers in that range."
        )
    return tuple(sorted(set(spec)))
