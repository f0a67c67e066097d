"""Speculative decoding: transformers' assisted generation with a decoding method.

One forward of the model verifies several drafted tokens, and the method refines the logits at each of their positions. Drafts
come from an assistant model, from the prompt (prompt lookup) or from the model's own early layers, without the method. They
affect how many tokens are accepted, never which ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import AssistedCandidateGenerator, EarlyExitCandidateGenerator

from revisit.errors import RevisitError, brief
from revisit.forward.contrast import ModelWrapper
from revisit.forward.prompt import Prompt
from revisit.forward.states import hooks_paused
from revisit.models.parts import describe


class Speculation(ModelWrapper):
    """A wrapper of the model for assisted generation: drafts without the method, and reports how many tokens were accepted."""

    def __init__(self, prompt: Prompt, processors: LogitsProcessorList, accept: Callable[[int], None]) -> None:
        super().__init__(prompt.model, [])
        self._inputs, self._accept = prompt.inputs, accept
        self._processors = processors  # for drafts: those of the call that keep no state, without the method

    def _get_candidate_generator(self, **arguments: object) -> Any:
        generator = self._model._get_candidate_generator(**{**arguments, "logits_processor": self._processors})
        draft = generator.get_candidates
        if isinstance(generator, EarlyExitCandidateGenerator):
            draft = partial(self._draft_early, generator)

        def first(input_ids: Tensor, **kwargs: object) -> tuple[Tensor, None]:
            with hooks_paused(), self._with_image(generator):
                draft(input_ids, **kwargs)
            generator.get_candidates = later
            return input_ids, None  # the prefill runs the prompt alone, as in plain decoding

        def later(input_ids: Tensor, **kwargs: object) -> Any:
            with hooks_paused():
                return draft(input_ids, **kwargs)

        generator.get_candidates = first
        return generator

    @contextmanager
    def _with_image(self, generator: Any) -> Iterator[None]:
        """Let an assistant draft one token with the image in its prompt, which transformers leaves out (5.23)."""
        if not isinstance(generator, AssistedCandidateGenerator):
            yield
            return
        inputs, assistant, prompt = generator.assistant_kwargs, generator.assistant_model, self._inputs
        if assistant is not self._model:  # it encodes the image and computes the positions itself
            accepted = inspect.signature(assistant.forward).parameters
            dropped = {"mm_encoder_outputs", "position_ids", *(name for name in prompt if name not in accepted)}
            inputs = {name: value for name, value in inputs.items() if name not in dropped}
            pixels = {name: value for name, value in prompt.items() if name in accepted and name != "input_ids"}
            generator.assistant_kwargs = pixels | inputs
        tokens, generator.num_assistant_tokens = generator.num_assistant_tokens, 1
        generator.generation_config.is_assistant = False
        yield
        generator.num_assistant_tokens, generator.generation_config.is_assistant = tokens, True
        kept = {*inputs, "past_key_values"} - {"mm_encoder_outputs"}
        generator.assistant_kwargs = {n: v for n, v in generator.assistant_kwargs.items() if n in kept}

    def _draft_early(self, generator: EarlyExitCandidateGenerator, input_ids: Tensor) -> Any:
        """Draft with the first decoder layers, which transformers finds only in models without a text configuration."""
        decoder, count = self._model.get_decoder(), generator.assistant_early_exit
        layers, depth = decoder.layers, decoder.config.num_hidden_layers
        try:
            decoder.layers, decoder.config.num_hidden_layers = layers[:count], count
            return AssistedCandidateGenerator.get_candidates(generator, input_ids)  # type: ignore[arg-type]
        except (IndexError, ValueError) as error:
            raise RevisitError(
                f"assistant_early_exit={count} does not work with {describe(self._model)} ({brief(error)}): use "
                "prompt_lookup_num_tokens, or an assistant_model."
            ) from error
        finally:
            decoder.layers, decoder.config.num_hidden_layers = layers, depth

    def _update_model_kwargs_for_generation(self, *args: object, num_new_tokens: int = 1, **kwargs: object) -> Any:
        self._accept(num_new_tokens)
        return self._model._update_model_kwargs_for_generation(*args, num_new_tokens=num_new_tokens, **kwargs)
