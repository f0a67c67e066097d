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
from collections.abc import Callable, Iterator, Sequence
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

from revisit.decoding.row_guard import AnswerGuard
from revisit.errors import RevisitError
from revisit.forward.support import name_support
from revisit.methods.revisit import ReVisiT
from revisit.models.head import LinearHead, multiply
from revisit.step.choice import choose, withhold
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
    if method.phase != "both" or method.select == "random":
        raise RevisitError("revisit.llama_cpp does not support phase and select='random': leave them out.")
    depth = int(llm.metadata.get(f"{llm.metadata.get('general.architecture')}.block_count", 0))
    if method.floor_layer not in (None, depth):
        raise RevisitError("revisit.llama_cpp can read the last layer only: leave out floor_layer.")
    handler: Any = llm.chat_handler
    if not hasattr(handler, "_mtmd_cpp"):
        raise RevisitError("revisit.llama_cpp needs a Llama with a multimodal chat handler, such as MTMDChatHandler.")
    if llm.draft_model is not None:
        raise RevisitError("revisit.llama_cpp does not support a draft model: leave draft_model out.")
    if transformed := [name for name in llm.metadata if name.endswith(LOGIT_TRANSFORMS)]:
        raise RevisitError(f"revisit.llama_cpp does not support this model: its logits depend on {transformed[0]}.")
    head = read_head(llm.model_path)
    names = AnswerGuard(Vocabulary(llm), None, method) if method.floor else None  # type: ignore[arg-type]
    refiner = Refiner(choose(head, method.rule(), torch.device("cpu")), llm.n_embd(), names)
    library = handler._mtmd_cpp
    handler._mtmd_cpp = _Observed(library, refiner)
    try:
        yield refiner
    finally:
        handler._mtmd_cpp = library
    refiner.check()


class Refiner:
    """A logits processor that applies ReVisiT's step; made by `attach`."""

    def __init__(self, step: Step, width: int, names: AnswerGuard | None = None) -> None:
        self._step, self._width, self._names = step, width, names
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
            states = torch.from_numpy(np.concatenate(self._chunks))
            self._states = RowStates.of_items([states])
            self._prompt = len(input_ids)
            if self._names is not None:
                support = name_support(self._step.head, states, self._names.spelling)
                self._names.begin(input_ids.tolist(), support)
        written = torch.from_numpy(np.array(input_ids[self._prompt :], np.int64))[None]
        logits = torch.from_numpy(np.array(scores))[None]
        output = self._step.take(StepInput(logits, self._states, written=written))
        refined = output.scores[0]
        if self._names is not None:
            withheld = torch.zeros_like(logits, dtype=torch.bool)
            withheld[0, self._names.blocked(written[0].tolist())] = True
            refined = withhold(output.scores, logits, withheld)[0]
        return refined.numpy()  # type: ignore[no-any-return]

    @property
    def support(self) -> dict[str, float]:
        """The support of each category of names by the last image, with `floor`; names below the floor are withheld."""
        return {} if self._names is None else self._names.support

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

    def part(start: int, end: int) -> Tensor:
        return torch.from_numpy(gguf.dequantize(tensor.data[start:end], tensor.tensor_type).copy())

    @lru_cache(CACHED_ROWS)
    def row(token: int) -> Tensor:
        return part(token, token + 1)[0]

    width, vocabulary = (int(size) for size in tensor.shape[:2])
    return QuantizedHead(torch.empty(vocabulary, width, device="meta"), row=row, part=part)


@dataclass(frozen=True)
class QuantizedHead(LinearHead):
    """The quantized LM head of a GGUF file; only rows that are needed are dequantized."""

    row: Callable[[int], Tensor] = field(kw_only=True)
    part: Callable[[int, int], Tensor] = field(kw_only=True)  # the rows from one token to another

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        return True

    def rows(self, values: Tensor, ids: Tensor) -> Tensor:
        return torch.stack([self.row(token) for token in ids.flatten().tolist()]).view(*ids.shape, -1)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def all_logits(self, states: Tensor) -> Tensor:
        """Project states over the whole vocabulary, dequantized in parts.  (n, d) -> (n, V)"""
        starts = range(0, self.vocabulary, CACHED_ROWS)
        return torch.cat([multiply(states, self.part(start, start + CACHED_ROWS)) for start in starts], -1)


class Vocabulary:
    """The tokenizer of a `Llama`, as far as the spellings of names need it."""

    unk_token_id = None

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm, self._vocab = llm, llama_cpp.llama_model_get_vocab(llm.model)
        self.all_special_ids = [token for token in range(len(self)) if self._is_special(token)]

    def _is_special(self, token: int) -> bool:
        return bool(
            llama_cpp.llama_vocab_is_control(self._vocab, token) or llama_cpp.llama_vocab_is_eog(self._vocab, token)
        )

    def __len__(self) -> int:
        return int(self._llm.n_vocab())

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the tokens of a text."""
        return list(self._llm.tokenize(text.encode(), add_bos=False, special=False))

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        """Return the text of tokens, with the space before the first word."""
        return b"".join(map(self._piece, tokens)).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        """Return a token's piece, which begins with a space where the token does."""
        return self.decode([token])

    def convert_tokens_to_ids(self, piece: str) -> int | None:
        """Return the special token with this text."""
        tokens = self._llm.tokenize(piece.encode(), add_bos=False, special=True)
        return tokens[0] if len(tokens) == 1 else None

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, 256, 0, True)
        return buffer.raw[: max(0, size)]
