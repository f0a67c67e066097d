"""Types in public signatures: models, processors, images and model inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import BinaryIO, TypeAlias

    import numpy as np
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedModel, ProcessorMixin

    Model: TypeAlias = PreTrainedModel  # with generate(): any model that AutoModelForImageTextToText loads
    Configured: TypeAlias = Any  # a model, or only the two configurations that recommended settings are read from
    Processor: TypeAlias = ProcessorMixin  # tokenizer, image processor and chat template in one
    Tokenizer: TypeAlias = Any
    # A path, encoded bytes, an open file, a PIL image, or an array of pixels (height, width, 3).
    ImageLike: TypeAlias = (
        str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image | np.ndarray | Tensor
    )
    # A path, bytes or a data URI of a video file, a list of frames, a list of (frame, time) pairs, or a `Video`.
    VideoLike: TypeAlias = Any
    # The output of a processor: `input_ids`, `attention_mask`, `pixel_values` and any other input of the model.
    Inputs: TypeAlias = Mapping[str, Any]
else:
    Configured = ImageLike = Inputs = Model = Processor = Tokenizer = VideoLike = Any
