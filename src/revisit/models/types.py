"""Types in public signatures: models, processors and model inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from transformers import PreTrainedModel, ProcessorMixin

    Model: TypeAlias = PreTrainedModel  # with generate(): any model that AutoModelForImageTextToText loads
    Configured: TypeAlias = Any  # a model, or only the two configurations that recommended settings are read from
    Processor: TypeAlias = ProcessorMixin  # tokenizer, image processor and chat template in one
    Tokenizer: TypeAlias = Any
    # The output of a processor: `input_ids`, `attention_mask`, `pixel_values` and any other input of the model.
    Inputs: TypeAlias = Mapping[str, Any]
    Arguments: TypeAlias = dict[str, Any]  # keyword arguments of a model or of `generate`
else:
    Arguments = Configured = Inputs = Model = Processor = Tokenizer = Any
