"""Tokenizers of the kinds that models have: SentencePiece's, whose words carry a leading mark, and byte-level ones.

The two small ones hold the words of the methods' own sentences and of COCO's objects as one token each, "image" among them. LLaMA's own
32,000 tokens are added if the reference material lies beside the clone, and Mistral's two if mistral-common is installed.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import families
from revisit.methods import code, icd
from revisit.models.processors import load_processor
from revisit.words import WORDS

LLAMA = Path(__file__).parents[2] / "shared" / "data" / "tokenizers" / "llama_vocab.json"
_FOUND = importlib.util.find_spec("mistral_common")
MISTRAL = Path(_FOUND.origin).parent / "data" if _FOUND and _FOUND.origin else None
MARKS = tuple(dict.fromkeys(token for token in (*families.SPECIAL, *families.ADDED) if token not in ("<s>", "</s>")))


def names() -> list[str]:
    """List the vocabularies that are at hand."""
    return [
        "marked",
        "bytes",
        "tiny",
        *(["llama"] if LLAMA.is_file() else []),
        *(["mistral", "tekken"] if MISTRAL else []),
    ]


@functools.cache
def load(name: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer, with the special tokens of all families' processors."""
    if name == "tiny":
        tokenizer = load_processor("tiny").tokenizer
        tokenizer.add_tokens([AddedToken(mark, normalized=False, special=True) for mark in ("<unk>", *MARKS)])
        return tokenizer
    if name in ("bytes", "tekken"):
        core = byte_level(_tekken() if name == "tekken" else _alphabet() + _parts(f"Ġ{word}" for word in words()))
    else:
        pieces = {"llama": _llama, "mistral": _mistral, "marked": _small}[name]()
        core = marked(pieces)
    core.add_special_tokens(
        [AddedToken(mark, normalized=False, special=True) for mark in ("<unk>", "<s>", "</s>", *MARKS)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
    )


def marked(pieces: list[str]) -> Tokenizer:
    """Make a tokenizer of LLaMA's kind from its tokens in the order of their ids: earlier tokens are merged first."""
    ids = {token: number for number, token in enumerate(pieces)}
    core = Tokenizer(models.BPE(ids, merges(ids), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def byte_level(pieces: list[str]) -> Tokenizer:
    """Make a byte-level tokenizer from its tokens in the order of their ids."""
    ids = {token: number for number, token in enumerate(pieces)}
    core = Tokenizer(models.BPE(ids, merges(ids)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def merges(ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes another one, in the order of the merged token's id."""
    cuts = ((token, token[:at], token[at:]) for token in ids for at in range(1, len(token)))
    pairs = [(ids[token], ids[a], ids[b], a, b) for token, a, b in cuts if a in ids and b in ids]
    return [(a, b) for *_, a, b in sorted(pairs)]


def words() -> set[str]:
    """Return the words of the small vocabularies."""
    sentences = (code.REQUEST, *(method.sentence for method in (icd.ICD(), icd.ICD.sid(), icd.ICD.questions())), *WORDS)
    return {word.strip(".,") for sentence in sentences for word in sentence.split()}


def _parts(tokens: Iterable[str]) -> list[str]:
    parts = {token[:length] for token in tokens for length in range(2, len(token) + 1)}
    return sorted(parts, key=lambda part: (len(part), part))


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _small() -> list[str]:
    letters = ["▁", *map(chr, range(33, 127))]
    known = [mark + word for word in words() for mark in ("▁", "")]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *_parts(known)]


def _llama() -> list[str]:
    return list(json.loads(LLAMA.read_text("utf-8")))


def _mistral() -> list[str]:
    model = SentencePieceProcessor(str(MISTRAL / "tokenizer.model.v1"))
    return [model.id_to_piece(number) for number in range(model.get_piece_size())]


def _tekken() -> list[str]:
    letters = bytes_to_unicode()
    entries = json.loads((MISTRAL / "tekken_240911.json").read_text("utf-8"))["vocab"]
    ordered = sorted(entries, key=lambda entry: entry["rank"])
    return ["".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in ordered]
