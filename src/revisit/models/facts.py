"""Facts about a model that need no weights, for `revisit doctor MODEL`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.config import describe_model
from revisit.models.families import LAYER_SETS, resolve_layers
from revisit.models.parts import declares_tied_head, unsupported, vision_mask, vision_token_ids
from revisit.models.processors import load_processor
from revisit.models.prompts import prepare
from revisit.models.thoughts import find_thoughts
from revisit.models.types import Processor


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the configuration, the processor and the generation settings."""

    name: str
    model_type: str
    family: str  # names of the family's models; empty if the tests decode none of them
    depth: int  # decoder layers
    width: int  # size of a hidden state
    vocabulary: int
    tied: bool  # whether the LM head shares its weights with the embedding
    dtype: str  # of the checkpoint; empty if it is not declared
    image_size: tuple[int, int]  # width, height of the image that `vision_tokens` counts
    vision_tokens: int | None  # of one image of that size
    layers: dict[str, tuple[int, ...]]  # name of a set -> hidden states; 0 is the embedding, `depth` the last
    recommended: dict[str, Any]  # settings of ReVisiT
    problems: tuple[str, ...]  # reasons why ReVisiT cannot be used, one sentence each
    warnings: tuple[str, ...]  # features that will not work, and the reason; one sentence each
    vllm: bool  # whether the vLLM plug-in supports it
    thought: tuple[str, str] | None  # tokens around a thought; None if its tokenizer does not have them

    def state_bytes(self, layers: str) -> int | None:
        """Return the bytes of one image's vision states in float32; None if their number is unknown."""
        if self.vision_tokens is None:
            return None
        return self.vision_tokens * self.width * 4 * len(self.layers[layers])


def model_facts(
    name: str | Path, *, image_size: tuple[int, int] = (640, 480), trust_remote_code: bool = False
) -> ModelFacts:
    """Collect the facts about a model."""
    if min(image_size) < 1 or max(image_size) > 20_000:
        raise RevisitError(
            f"An image of {image_size[0]}×{image_size[1]} pixels is out of range: use sizes from 1 to 20000."
        )
    described = describe_model(str(name), trust_remote_code)
    config, text = described.config, described.config.get_text_config()
    family = families.of(config.model_type)
    problems = [reason] if (reason := unsupported(config, f"A model of type {config.model_type}")) else []
    tokens = thoughts = None
    if not problems:
        try:
            processor = load_processor(name, trust_remote_code=trust_remote_code)
            thoughts = find_thoughts(processor.tokenizer, config.model_type)
            tokens = vision_tokens(processor, config, image_size)
        except RevisitError as error:
            problems.append(str(error))
    dtype = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    warnings = [] if family.patch_map else [f"Pages cannot show patches on the image: {family.no_patch_map}"]
    depth = int(getattr(text, "num_hidden_layers", 0))
    tied = declares_tied_head(config)
    declared = getattr(described.generation_config, "revisit", None)
    return ModelFacts(
        name=str(name),
        model_type=config.model_type,
        family=family.title,
        depth=depth,
        width=int(getattr(text, "hidden_size", 0)),
        vocabulary=int(getattr(text, "vocab_size", 0)),
        tied=tied,
        dtype=dtype,
        image_size=image_size,
        vision_tokens=tokens,
        layers={name: resolve_layers(name, depth, tied) for name in LAYER_SETS},
        recommended={"layers": family.layers, **(declared if isinstance(declared, dict) else {})},
        problems=tuple(problems),
        warnings=tuple(warnings),
        vllm=bool(family.vllm),
        thought=None if thoughts is None else family.thought,
    )


def vision_tokens(processor: Processor, config: object, size: tuple[int, int]) -> int:
    """Count the vision tokens of one image of this size in the output of the model's processor."""
    inputs = prepare(processor, ["x"], [[Image.new("RGB", size)]])
    return int(vision_mask(inputs["input_ids"], vision_token_ids(config)).sum())
