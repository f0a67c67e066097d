"""Types of public signatures: models, processors, images and their inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    # A path, encoded bytes, an open file, a PIL image, or an array of pixels (height, width, 3).
    ImageLike: TypeAlias = (
        str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image | np.ndarray | Tensor
    )
    # What a processor returns: `input_ids`, `attention_mask`, `pixel_values` and whatever else the model takes.
    Inputs: TypeAlias = Mapping[str, Any]


class Configured(Protocol):
    """A model, or only its two configurations, from which recommended settings are read."""

    config: Any
    generation_config: Any


class Model(Configured, Protocol):
    """A transformers model with `generate()`: any PreTrainedModel that AutoModelForImageTextToText loads."""

    device: torch.device
    dtype: torch.dtype

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_decoder(self) -> Any: ...

    def generate(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_input_embeddings(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Tokenizer(Protocol):
    """A transformers tokenizer."""

    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    pad_token: str | None
    pad_token_id: int | None
    unk_token_id: int | None
    padding_side: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, *args: Any, **kwargs: Any) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    def convert_ids_to_tokens(self, *args: Any, **kwargs: Any) -> Any: ...


class Processor(Protocol):
    """A transformers processor: tokenizer, image processor and chat template in one."""

    tokenizer: Tokenizer
    image_processor: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]: ...
