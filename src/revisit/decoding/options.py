"""Checks of the options of one call of transformers' `generate()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from packaging.version import Version
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from revisit.decoding.arguments import Arguments
from revisit.decoding.settings import CallOptions
from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.parts import describe, text_config
from revisit.models.types import Model

if TYPE_CHECKING:
    from revisit.decoding.method import Method

BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION, *BEAMS)
CHUNKS_SINCE = "5.23"  # of transformers: earlier versions lose the image between the chunks of a prefill


def check_options(method: Method, model: Model, config: GenerationConfig, arguments: Arguments) -> GenerationMode:
    """Check the arguments of `generate()`, and return transformers' decoding mode for them.

    Raises:
        RevisitError: An option is out of range, or cannot be combined with the method.
    """
    names = ("num_beams", "temperature", "top_p") if config.do_sample else ("num_beams",)
    CallOptions.read({name: value for name in names if (value := getattr(config, name)) is not None}, "generate")
    assistant = arguments.assistant_model
    mode = config.get_generation_mode(assistant)
    if mode not in MODES:
        raise RevisitError(
            "Decoding methods work with greedy search, sampling, beams and speculation, not with "
            f"{mode.value.replace('_', ' ')}: remove the options that enable it."
        )
    if (mode in BEAMS or method.own_beams > 1) and arguments.streamer is not None:
        raise RevisitError("Beam search cannot be streamed: remove the streamer, or decode without beams.")
    if method.needs_cache and not config.use_cache:
        raise RevisitError(
            f"{method.name} changes the newest token's forward pass, and later tokens read its result from the KV cache: leave out "
            "use_cache=False."
        )
    _check_drafts(method, model, mode, config, assistant)
    if config.prefill_chunk_size is not None:
        _check_chunks(method, model)
    return mode


def _check_drafts(method: Method, model: Model, mode: GenerationMode, config: GenerationConfig, assistant: Any) -> None:
    """Raise RevisitError for speculative decoding that is not possible."""
    text, lookup, early = text_config(model.config), config.prompt_lookup_num_tokens, config.assistant_early_exit
    if mode in BEAMS and any(option is not None for option in (assistant, lookup, early)):
        raise RevisitError(
            "Beam search cannot be speculative: remove num_beams, or assistant_model, prompt_lookup_num_tokens and assistant_early_exit."
        )
    if lookup is not None and not (isinstance(lookup, int) and lookup > 0):
        raise RevisitError(f"prompt_lookup_num_tokens must be a number of tokens above 0, not {lookup!r}.")
    if assistant is not None and not hasattr(assistant, "generate"):
        raise RevisitError(f"assistant_model must be a loaded model, not a {type(assistant).__name__}.")
    if assistant is not None and text_config(assistant.config).vocab_size != text.vocab_size:
        raise RevisitError(
            "The assistant_model has another vocabulary than the model: use one with the same tokenizer, or prompt_lookup_num_tokens."
        )
    if mode == GenerationMode.ASSISTED_GENERATION and not method.speculative:
        raise RevisitError(
            f"{method.name} cannot decode speculatively, because its steps depend on more than the logits of one position: remove "
            "assistant_model, prompt_lookup_num_tokens or assistant_early_exit, or use another method."
        )
    if early is not None and not (isinstance(early, int) and 1 <= early <= text.num_hidden_layers):
        raise RevisitError(
            f"assistant_early_exit must be a number of decoder layers from 1 to {text.num_hidden_layers}, not {early!r}."
        )


def _check_chunks(method: Method, model: Model) -> None:
    """Raise RevisitError for a prompt that cannot be run in chunks."""
    if not method.speculative:
        raise RevisitError(f"{method.name} reads the prompt in one forward: remove prefill_chunk_size.")
    if families.of(model.config.model_type).attends_ahead:
        raise RevisitError(
            f"Positions of an image attend to later ones in {describe(model)}, so a prompt must run in one forward: remove "
            "prefill_chunk_size."
        )
    if Version(transformers.__version__) < Version(CHUNKS_SINCE):
        raise RevisitError(
            f"prefill_chunk_size needs transformers {CHUNKS_SINCE}: {transformers.__version__} loses the image between chunks."
        )
