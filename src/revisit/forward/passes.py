"""The forward passes of one call of generate(), and what observes, changes or contrasts them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, StaticLayer

from revisit.errors import RevisitError
from revisit.forward.attention import AttentionHook, Call, watching
from revisit.forward.contrast import Contrast, Contrasted, ModelWrapper, prepared, running
from revisit.forward.early_exits import EarlyExits
from revisit.forward.prompt import CACHE, Prompt
from revisit.forward.states import Capture, Hooks, Pass, StateHook, saved_positions
from revisit.models.families import resolve_layers
from revisit.models.parts import describe
from revisit.models.types import Arguments


class Passes:
    """The forward passes of one call: the main one, contrasted ones next to it, and who sees which.

    Functions that a method adds are called in main passes by default, get the rows of the pass only, and are removed when the call
    ends. With `of`, they are called in the passes of a `Contrast` instead.

    Attributes:
        raw: (rows, V) the model's own logits at this step, even for a later method of a chain.
        ended: (rows,) the rows that had ended before this step; None if no row can have.
        model: What the decoding loop runs: the model, or a wrapper of it that also runs contrasted passes.
        stack: Closed when the call ends, however it ends.
    """

    def __init__(self, prompt: Prompt, stack: ExitStack) -> None:
        self.prompt, self.stack = prompt, stack
        self.raw: Tensor
        self.ended: Tensor | None = None
        self.model: Any = prompt.model
        self.main = Pass(slice(0, len(prompt.ids)))
        self._reordered: list[Callable[[Tensor], None]] = []
        self._reads_early_layers = False
        self._attention_unread = False  # whether a function of `on_attention` has not been called yet

    # -- reading and changing states ----------------------------------------------------------------------------------

    def on_layer(self, number: int, function: StateHook, *, of: Pass | None = None) -> Hooks:
        """Call a function with hidden state `number` of each forward (rows, q, d); what it returns, unless None, replaces the state.

        0 is the input of the first decoder layer, and the number of layers is the normed final state.
        """
        hooks = Hooks(self.stack, of=of or self.main)
        hooks.state(self.prompt.parts, number, function)
        return hooks

    def on_input(self, module: nn.Module, function: StateHook, *, of: Pass | None = None) -> Hooks:
        """Call a function with the states (rows, q, d) that enter a module; what it returns, unless None, replaces them."""
        hooks = Hooks(self.stack, of=of or self.main)
        hooks.before(module, function)
        return hooks

    def on_output(self, module: nn.Module, function: StateHook, *, of: Pass | None = None) -> Hooks:
        """Call a function with the states (rows, q, d) that a module returns; what it returns, unless None, replaces them."""
        hooks = Hooks(self.stack, of=of or self.main)
        hooks.after(module, function)
        return hooks

    def capture(self, layers: str | tuple[int, ...], *, final_norm: bool = False) -> Capture:
        """Capture the vision tokens' states at these layers, or a set of layers such as "last", while the prompt runs.

        `Capture.head(passes.raw)` completes it at the first step.
        """
        prompt, parts = self.prompt, self.prompt.parts
        vision, known = prompt.vision, resolve_layers(layers, parts.depth, parts.tied)
        layers = known if isinstance(layers, str) else layers
        options: Arguments = {"of": self.main, "final_norm": final_norm, "cache": prompt.cache}
        return Capture(parts, vision, layers, prompt.rows_per_item, self.stack, **options)

    def early_exits(self, layers: tuple[int, ...], *, final_norm: bool = False) -> EarlyExits:
        """Project the last position's states at these layers through the LM head, at every step."""
        if self._reads_early_layers:
            raise RevisitError(
                "Only one method of a chain can read early layers (DoLa, DeCo, VISTA): remove the others."
            )
        self._reads_early_layers = True
        return EarlyExits(self.prompt.parts, layers, self.main, self.stack, final_norm=final_norm)

    # -- attention ------------------------------------------------------------------------------------------------------

    def on_attention(
        self,
        function: AttentionHook,
        layers: Collection[int] | None = None,
        *,
        of: Pass | None = None,
        prompt_only: bool = False,
    ) -> None:
        """Call a function before each attention call of the decoder.

        Args:
            function: Reads or changes a `Call`, whose rows and columns are those of the pass.
            layers: The decoder layers, from 0; None for all.
            of: The contrasted pass that it gets; the main one by default.
            prompt_only: Whether it needs the prompt's attention only, so that later steps may leave a sliding window.

        Raises:
            RevisitError: The model's attention cannot be hooked, or the call may outgrow the sliding window of some layer,
                where the image's columns in the attention are no longer known.
        """
        prompt, text = self.prompt, self.prompt.model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        slides = "sliding_attention" in (getattr(text, "layer_types", None) or ())
        if not prompt_only and slides and window and prompt.config.max_length > window:
            raise RevisitError(
                f"{prompt.method} works on attention, and some layers of {describe(prompt.model)} see only the last {window} tokens, fewer "
                f"than the {prompt.config.max_length} that this call may reach: use a smaller max_new_tokens, or another method."
            )
        self._attention_unread = True

        def called(call: Call) -> Callable[[Tensor], None] | None:
            self._attention_unread = False
            return function(call)

        self.stack.enter_context(watching(prompt.parts, called, prompt.method, layers, of or self.main))

    def check_attention(self) -> None:
        """Raise RevisitError if the model has run without calling any function of `on_attention`."""
        if self._attention_unread:
            raise RevisitError(
                f"{self.prompt.method}: {describe(self.prompt.model)} computes its attention without transformers' attention "
                "interface, so it cannot be read or changed: use another method."
            )

    # -- further passes -------------------------------------------------------------------------------------------------

    def contrast(
        self, inputs: Arguments | None = None, mode: Literal["auto", "stacked", "sequential"] = "auto"
    ) -> Contrast:
        """Add a second pass of the model at every step, for the inputs of another prompt; None for the same prompt again.

        Args:
            inputs: Arguments of `generate` for the other prompts.
            mode: "stacked" runs both passes as one batch with one KV cache; "sequential" runs one after the other, as is done for
                models whose caches cannot be stacked; "auto" stacks, except for a single row on a CPU.
        """
        ids, kwargs, config = prepared(self.prompt, inputs)
        alone_on_cpu = len(self.prompt.ids) == 1 and self.prompt.ids.device.type == "cpu"
        if not isinstance(self.model, Contrasted):
            self.model = Contrasted(self.prompt, self.main, self._reordered, self.stack)
        contrast = Contrast(None, ids=ids, kwargs=kwargs, config=config)
        self.model.add(contrast, stacked=mode == "stacked" or (mode == "auto" and not alone_on_cpu))
        return contrast

    def last_states(self, inputs: Arguments | None) -> list[Tensor]:
        """Run a prompt, by default the call's, on its own and return the output of every decoder layer at its last token.

        -> layers × (rows, d)
        """
        outputs: list[Tensor] = []
        model = self.prompt.model
        ids, kwargs, config = prepared(self.prompt, inputs)
        with ExitStack() as stack, saved_positions(model), running(None, instead_of=self.main):
            hooks = Hooks(stack)
            for layer in self.prompt.parts.layers:
                hooks.after(layer, lambda states: outputs.append(states[:, -1].clone()))
            model._prefill(ids, config, kwargs)
        return outputs

    def look_ahead(self, input_ids: Tensor, token: Tensor) -> Generator[Tensor]:
        """Yield the greedy continuation from a first token (rows,), one token longer each time.

        No function is called in these forwards. Close the generator before the next step: it crops the KV cache.  -> (rows, n)
        """
        if not self.prompt.ids.shape[1] or isinstance(self.model, Contrasted):
            raise RevisitError(
                f"{self.prompt.method} looks ahead, which needs the prompt as input_ids and a KV cache without a contrasted pass: "
                "use it alone, or in a chain without contrastive methods."
            )
        return self._ahead(input_ids, token)

    def _ahead(self, input_ids: Tensor, token: Tensor) -> Generator[Tensor]:
        kwargs, cache = dict(self.prompt.prepared), self.prompt.cache
        ids, known = torch.cat([input_ids, token[:, None]], dim=1), self.prompt.ids.shape[1]
        ahead = 0  # tokens in the KV cache after `input_ids`
        crops = cache is not None and all(type(layer) is DynamicLayer for layer in cache.layers)
        static = cache is not None and any(isinstance(layer, StaticLayer) for layer in cache.layers)
        try:
            while True:
                yield ids[:, input_ids.shape[1] :]
                if static and ids.shape[1] >= self.prompt.config.max_length:
                    raise RevisitError(
                        f"{self.prompt.method} looks ahead beyond the KV cache of fixed size: leave out cache_implementation."
                    )
                if not (ahead or crops):
                    kwargs[CACHE] = copy.deepcopy(cache)
                with running(None, instead_of=self.main):
                    output, kwargs = advance(self.prompt.model, ids, kwargs, ids.shape[1] - known, 1)
                known, ahead = ids.shape[1], ahead + 1
                ids = torch.cat([ids, output.logits[:, -1].argmax(-1, keepdim=True).to(ids.device)], dim=1)
        finally:
            if cache is not None and crops and ahead:
                cache.crop(-ahead)

    def on_reorder(self, function: Callable[[Tensor], None]) -> None:
        """Call a function with (rows,) whenever beams are reordered: row i continues what was row rows[i]."""
        if self.prompt.beams and not self.prompt.config.use_cache:
            raise RevisitError(
                f"{self.prompt.method} follows beams, which transformers reorders with their KV cache: leave out use_cache=False."
            )
        self.wrapped()
        self._reordered.append(function)

    def wrapped(self) -> ModelWrapper:
        """Return a wrapper of the model that calls the functions of `on_reorder`, and let the loop run it."""
        if not isinstance(self.model, ModelWrapper):
            self.model = ModelWrapper(self.model, self._reordered)
        return self.model


def advance(model: Any, ids: Tensor, kwargs: Arguments, new: int, count: int) -> tuple[Any, Arguments]:
    """Run the last `count` tokens, or all without a KV cache; `new` tokens were added since `kwargs` were prepared.

    -> the model's output, and the keyword arguments for the next tokens
    """
    kwargs = model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=new)
    length = count if kwargs.get("use_cache", True) else None
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=length, **kwargs)
    return model(**inputs, return_dict=True), kwargs
