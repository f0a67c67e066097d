"""Tokenizers of the two common kinds, trained on a few words."""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = """
a the dog cat dogs cats table dining chair toilet seat wine glass glasses person person's and with near sits
on of in there is are The A There two small hot phone cell bench bow tie cow to back be for hand
"""
WORDS = TEXT.split()


@functools.cache
def train(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer that encodes each of WORDS as one token and all other words as several."""
    core = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token="<unk>"))
    text = [" ".join(["x", word]) for word in WORDS for _ in range(3)]
    if kind == "bytes":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<pad>", "<unk>", "</s>"]
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,'\"!-▁")
        special = ["<pad>", "<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    core.train_from_iterator(text, trainer)
    described = json.loads(core.to_str())  # the trainer takes bytes only as special tokens, which decoding would skip
    described["added_tokens"] = [t for t in described["added_tokens"] if not t["content"].startswith("<0x")]
    core = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
