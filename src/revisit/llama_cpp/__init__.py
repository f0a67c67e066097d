"""ReVisiT in llama-cpp-python: a logits processor for models with an image encoder.

    from llama_cpp import Llama, LogitsProcessorList
    from llama_cpp.llama_chat_format import MTMDChatHandler
    import revisit.llama_cpp

    llm = Llama("llava.gguf", chat_handler=MTMDChatHandler("mmproj.gguf"), n_ctx=4096)
    with revisit.llama_cpp.attach(llm) as refine:
        llm.create_chat_completion(messages, logits_processor=LogitsProcessorList([refine]), temperature=0)

llama.cpp returns the final hidden states of the image tokens as embeddings, the head's rows come from the GGUF file, and the step
is the one for CPUs. Only the last layer can be read, which is the paper's setting for LLaVA and InternVL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
from revisit.models.head import LinearHead
from revisit.step.choice import choose
from revisit.step.interface import RowStates, Step, StepInput

__all__ = ["Refiner", "attach"]

CACHED_ROWS = 4096  # of a quantized head, dequantized
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale")  # settings of models whose logits are not a plain product


@contextmanager
def attach(llm: llama_cpp.Llama, method: ReVisiT | None = None) -> Iterator[Refiner]:
    """Observe the image encoder of a model and yield ReVisiT's logits processor; restore the model at the end.

    Args:
        llm: A `Llama` with a multimodal chat handler.
        method: The settings; the paper's by default. `layers` must be "last".
    """
    method = method or ReVisiT()
    if method.layers != "last":
        raise RevisitError(f"revisit.llama_cpp can read the last layer only: use layers='last', not {method.layers!r}.")
    if method.phase != "both" or method.select == "random" or method.floor:
        raise RevisitError("revisit.llama_cpp does not support phase, floor and select='random': leave them out.")
    handler: Any = llm.chat_handler
    if not hasattr(handler, "_mtmd_cpp"):
        raise RevisitError("revisit.llama_cpp needs a Llama with a multimodal chat handler, such as MTMDChatHandler.")
    if llm.draft_model is not None:
        raise RevisitError("revisit.llama_cpp does not support a draft model: leave draft_model out.")
    if transformed := [name for name in llm.metadata if name.endswith(LOGIT_TRANSFORMS)]:
        raise RevisitError(f"revisit.llama_cpp does not support this model: its logits depend on {transformed[0]}.")
    head = read_head(llm.model_path)
    refiner = Refiner(choose(head, method.rule(), torch.device("cpu")), llm.n_embd())
    library = handler._mtmd_cpp
    handler._mtmd_cpp = _Observed(library, refiner)
    try:
        yield refiner
    finally:
        handler._mtmd_cpp = library
    refiner.check()


class Refiner:
    """A logits processor that applies ReVisiT's step; made by `attach`."""

    def __init__(self, step: Step, width: int) -> None:
        self._step, self._width = step, width
        self._error: Exception | None = None
        self.begin()

    def begin(self) -> None:
        """Start a prompt, and drop the states of the previous one."""
        self._chunks: list[NDArray[np.float32]] = []
        self._states: RowStates | None = None
        self._prompt: int | None = None  # length of the prompt, known at the first step

    def keep(self, context: Any, count: int) -> None:
        """Keep the states of the image tokens that were just decoded."""
        rows = [llama_cpp.llama_get_embeddings_ith(context, i) for i in range(count)]
        self._chunks.append(np.stack([np.ctypeslib.as_array(row, (self._width,)).copy() for row in rows]))

    def __call__(self, input_ids: NDArray[np.intc], scores: NDArray[np.single]) -> NDArray[np.single]:
        """Return the scores of one step.  (m,), (V,) -> (V,)"""
        try:
            return self._refine(input_ids, scores)
        except Exception as error:  # raised by `check`: llama.cpp's sampler would ignore it here
            self._error = self._error or error
            return scores

    def _refine(self, input_ids: NDArray[np.intc], scores: NDArray[np.single]) -> NDArray[np.single]:
        if self._states is None:
            if not self._chunks:
                raise RevisitError("revisit.llama_cpp found no image in the prompt: add an image to the messages.")
            self._states = RowStates.of_items([torch.from_numpy(np.concatenate(self._chunks))])
            self._prompt = len(input_ids)
        written = torch.from_numpy(np.array(input_ids[self._prompt :], np.int64))[None]
        logits = torch.from_numpy(np.array(scores))[None]
        output = self._step.take(StepInput(logits, self._states, written=written))
        refined: NDArray[np.single] = output.scores[0].numpy()
        return refined

    def check(self) -> None:
        """Raise the error of a step, or RevisitError if an image was encoded and no step was refined."""
        if self._error is not None:
            raise self._error
        if self._chunks and self._states is None:
            raise RevisitError(
                "llama.cpp decoded an image without ReVisiT: pass logits_processor=LogitsProcessorList([refine])."
            )


class _Observed:
    """llama.cpp's multimodal library, with the states of image chunks passed to a refiner."""

    def __init__(self, library: Any, refiner: Refiner) -> None:
        self._library, self._refiner = library, refiner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def mtmd_input_chunks_init(self) -> Any:
        self._refiner.begin()
        return self._library.mtmd_input_chunks_init()

    def mtmd_helper_eval_chunk_single(
        self, encoder: Any, context: Any, chunk: Any, past: Any, sequence: Any, batch: int, last: bool, new_past: Any
    ) -> int:
        """Encode and decode an image chunk as llama.cpp's helper does, with embeddings switched on."""
        library = self._library
        if library.mtmd_input_chunk_get_type(chunk) != library.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            result = library.mtmd_helper_eval_chunk_single(
                encoder, context, chunk, past, sequence, batch, last, new_past
            )
            return int(result)
        if result := library.mtmd_encode_chunk(encoder, chunk):
            return int(result)

        @library.mtmd_helper_post_decode_callback  # type: ignore[untyped-decorator]
        def keep(decoded: Any, _data: Any) -> int:
            self._refiner.keep(context, decoded.contents.n_tokens)
            return 0

        embedded = library.mtmd_get_output_embd(encoder)
        llama_cpp.llama_set_embeddings(context, True)
        try:
            result = library.mtmd_helper_decode_image_chunk(
                encoder, context, chunk, embedded, past, sequence, batch, new_past, keep, ctypes.c_void_p()
            )
        finally:
            llama_cpp.llama_set_embeddings(context, False)
        return int(result)


def read_head(path: str) -> LinearHead:
    """Read the LM head of a GGUF file, or the embedding that it is tied to."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensor = tensors.get("output.weight", tensors.get("token_embd.weight"))
    if tensor is None:
        raise RevisitError(f"{path!r} has no LM head: pass the part of the model that contains output.weight.")
    if tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return LinearHead(torch.from_numpy(np.array(tensor.data, np.float32)))

    @lru_cache(CACHED_ROWS)
    def row(token: int) -> Tensor:
        return torch.from_numpy(gguf.dequantize(tensor.data[token : token + 1], tensor.tensor_type)[0].copy())

    width, vocabulary = (int(size) for size in tensor.shape[:2])
    return QuantizedHead(torch.empty(vocabulary, width, device="meta"), row=row)


@dataclass(frozen=True)
class QuantizedHead(LinearHead):
    """The quantized LM head of a GGUF file; only rows that are needed are dequantized."""

    row: Callable[[int], Tensor] = field(kw_only=True)

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        return True

    def rows(self, values: Tensor, ids: Tensor) -> Tensor:
        return torch.stack([self.row(token) for token in ids.flatten().tolist()]).view(*ids.shape, -1)
