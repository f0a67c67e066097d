"""Grammars of xgrammar and outlines around a decoding method."""

from __future__ import annotations

import re
from typing import Any

import pytest

import revisit
from revisit.decoding.method import METHODS

QUESTION = "Please describe this image in detail."
SENTENCES = ("Yes, there is a dog.", "No.")
CHOICE = ["A cat on a bed.", "A suitcase at an airport."]
PLAIN = [name for name in METHODS.built_in if name not in ("chain", "opera", "tcd")]


def xgrammar(pair: Any, *texts: str) -> Any:
    """Return a processor whose rows may each write one text; for one row, any of the texts."""
    library = pytest.importorskip("xgrammar")
    model, processor = pair
    info = library.TokenizerInfo.from_huggingface(
        processor.tokenizer, vocab_size=model.config.get_text_config().vocab_size
    )
    compiler = library.GrammarCompiler(info)
    return library.contrib.hf.LogitsProcessor([compiler.compile_regex(re.escape(text)) for text in texts])


def outlines(pair: Any, pattern: str) -> Any:
    """Return a processor for a pattern, the same in each row."""
    library = pytest.importorskip("outlines")
    from outlines.backends import get_regex_logits_processor

    wrapped = library.from_transformers(pair[0], pair[1].tokenizer)
    return get_regex_logits_processor("outlines_core", wrapped, pattern)


def plainly(pair: Any, images: Any, processors: Any) -> list[str]:
    """Return the answers of transformers alone."""
    model, processor = pair
    inputs = revisit.prepare(processor, [QUESTION] * len(images), images)
    output = model.generate(**inputs, logits_processor=processors, max_new_tokens=32, do_sample=False)
    return revisit.generated_text(processor, output, inputs)


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "top_p": 0.9, "temperature": 0.8}], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("name", PLAIN)
def test_a_sentence_of_xgrammar_comes_out(pair: Any, answer: Any, name: str, options: Any) -> None:
    processors = [xgrammar(pair, *SENTENCES)]
    assert answer(pair, name, logits_processor=processors, max_new_tokens=32, **options) == list(SENTENCES)


@pytest.mark.parametrize("name", ["greedy", "revisit:alpha=1e-3", "revisit:floor=0.9", "vcd", "dola", "pai", "m3id"])
def test_a_row_without_an_image_follows_its_grammar(pair: Any, images: Any, answer: Any, name: str) -> None:
    options = {"logits_processor": [xgrammar(pair, *SENTENCES)], "max_new_tokens": 32}
    assert answer(pair, name, [images[:1], []], **options) == list(SENTENCES)


@pytest.mark.parametrize("grammar", ["xgrammar", "outlines"])
@pytest.mark.parametrize("name", ["greedy", "revisit", "flb"])
def test_drafted_tokens_follow_a_grammar(pair: Any, images: Any, answer: Any, name: str, grammar: str) -> None:
    processor = xgrammar(pair, SENTENCES[0]) if grammar == "xgrammar" else outlines(pair, re.escape(SENTENCES[0]))
    options = {"logits_processor": [processor], "max_new_tokens": 32, "prompt_lookup_num_tokens": 3}
    assert answer(pair, name, images[:1], **options) == [SENTENCES[0]]


@pytest.mark.parametrize("name", PLAIN)
def test_a_sentence_of_outlines_comes_out(pair: Any, answer: Any, name: str) -> None:
    processors = [outlines(pair, re.escape(SENTENCES[0]))]
    assert answer(pair, name, logits_processor=processors, max_new_tokens=32) == [SENTENCES[0]] * 2


@pytest.mark.parametrize("name", PLAIN)
def test_one_of_two_sentences_comes_out(pair: Any, images: Any, answer: Any, name: str) -> None:
    """Where the grammar leaves a choice, the method makes it."""
    found = answer(pair, name, logits_processor=[outlines(pair, "|".join(map(re.escape, CHOICE)))], max_new_tokens=32)
    assert set(found) <= set(CHOICE)
    if name == "greedy":
        other = [outlines(pair, "|".join(map(re.escape, CHOICE)))]
        assert found == plainly(pair, images, other)


@pytest.mark.parametrize("grammar", ["xgrammar", "outlines"])
def test_opera_writes_the_sentence(pair: Any, answer: Any, grammar: str) -> None:
    """With one beam: the states of both libraries belong to rows, which beams exchange."""
    processor = xgrammar(pair, *SENTENCES) if grammar == "xgrammar" else outlines(pair, re.escape(SENTENCES[0]))
    found = answer(pair, "opera:beams=1", logits_processor=[processor], max_new_tokens=32)
    assert found == (list(SENTENCES) if grammar == "xgrammar" else [SENTENCES[0]] * 2)
