"""What is known about a model before its weights are loaded, for `revisit doctor MODEL`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.config import describe_model
from revisit.models.families import LAYER_SETS, resolve_layers


@dataclass(frozen=True)
class ModelFacts:
    """From the configuration, the processor and the generation settings alone."""

    name: str
    model_type: str
    family: str  # the models that people know it by; empty if the tests decode none of the family
    depth: int  # decoder layers
    width: int  # numbers in one hidden state
    vocabulary: int
    tied: bool  # whether the head shares its weights with the embedding
    dtype: str  # of the checkpoint; empty where it does not say
    image_size: tuple[int, int]  # width, height asked about
    batch: int
    vision_tokens: int | None  # of one image of that size
    layers: dict[str, tuple[int, ...]]  # what each set means; hidden state 0 is the embedding, `depth` the last
    recommended: dict[str, Any]  # settings of ReVisiT
    refused: tuple[str, ...]  # what will not work, and why; one sentence each
    vllm: bool  # whether the vLLM plug-in knows it

    def state_bytes(self, layers: str) -> int | None:
        """Memory of the kept vision states of a whole batch in float32, one image in each row; None if the tokens are not known."""
        if self.vision_tokens is None:
            return None
        return self.batch * self.vision_tokens * self.width * 4 * len(self.layers[layers])


def model_facts(
    name: str | Path, *, image_size: tuple[int, int] = (640, 480), batch: int = 1, trust_remote_code: bool = False
) -> ModelFacts:
    """The facts of a model; `RevisitError` if there is no such model or its configuration cannot be read."""
    from revisit.models.parts import refusal

    if min(image_size) < 1 or max(image_size) > 20_000 or batch < 1:
        raise RevisitError(
            f"An image of {image_size[0]}×{image_size[1]} pixels in a batch of {batch} is not possible: use sizes "
            "from 1 to 20000 and a batch of at least 1."
        )
    about = describe_model(str(name), trust_remote_code)
    config, text = about.config, about.config.get_text_config()
    family = families.of(config.model_type)
    refused = [reason] if (reason := refusal(config, f"A model of type {config.model_type}")) else []
    tokens = None
    if not refused:
        try:
            tokens = vision_tokens(name, config, image_size, trust_remote_code)
        except RevisitError as error:
            refused.append(str(error))
    dtype = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
    if family.patch_map is None:
        refused.append(f"Patches on the image (decode pages, pointing): {family.no_patch_map}")
    depth = int(getattr(text, "num_hidden_layers", 0))
    tied = bool(getattr(text, "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False))
    own = getattr(about.generation_config, "revisit", None)
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
        batch=batch,
        vision_tokens=tokens,
        layers={name: resolve_layers(name, depth, tied) for name in LAYER_SETS},
        recommended={"layers": family.layers, **(own if isinstance(own, dict) else {})},
        refused=tuple(refused),
        vllm=family.vllm is not None,
    )


def vision_tokens(name: str | Path, config: Any, size: tuple[int, int], trust_remote_code: bool = False) -> int:
    """How many vision tokens one image of this size becomes: counted in what the model's own processor makes of it."""
    import torch
    from PIL import Image

    from revisit.models.parts import vision_token_ids
    from revisit.models.processors import load_processor
    from revisit.models.prompts import prepare

    processor = load_processor(name, trust_remote_code=trust_remote_code)
    inputs = prepare(processor, ["x"], [[Image.new("RGB", size)]])
    return int(torch.isin(inputs["input_ids"], torch.tensor(vision_token_ids(config))).sum())
