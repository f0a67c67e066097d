"""Variants of a prompt, on token ids that can be checked by eye."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import families
from revisit.decoding.prompt_edits import image_span, without_image
from revisit.methods.code import in_place_of_image
from revisit.methods.icd import after_image
from revisit.models.families import Edges, edges, of
from revisit.models.parts import vision_token_ids

START, IMAGE, END, BREAK = 7, 9, 8, 6
EDGES = Edges({START, END}, {BREAK})


def ids(*values: int) -> tuple[Tensor, Tensor]:
    row = torch.tensor(values)
    return row, row == IMAGE


def test_an_image_is_removed_with_the_tokens_next_to_it() -> None:
    row, vision = ids(1, START, IMAGE, IMAGE, END, 2, START, 3)
    assert image_span(row, vision, EDGES).tolist() == [False, True, True, True, True, False, False, False]
    assert without_image(row, vision, EDGES).tolist() == [0, 5, 6, 7]  # a boundary elsewhere is text


def test_two_images_and_a_separator() -> None:
    row, vision = ids(START, IMAGE, END, START, IMAGE, END, 4, IMAGE, 5)
    assert without_image(row, vision, EDGES).tolist() == [6, 8]
    assert without_image(row, vision, Edges()).tolist() == [0, 2, 3, 5, 6, 8]


def test_line_breaks_belong_to_an_image_only_between_its_tiles() -> None:
    row, vision = ids(BREAK, START, BREAK, IMAGE, END, BREAK, BREAK, START, IMAGE, BREAK, BREAK, 2)
    assert without_image(row, vision, EDGES).tolist() == [0, 9, 10, 11]


def test_words_are_inserted_after_the_last_image() -> None:
    row, vision = ids(1, START, IMAGE, END, 2)
    edit = after_image(row, vision, EDGES, torch.tensor([50, 51]))
    assert edit.tolist() == [0, 1, 2, 3, -51, -52, 4]  # new tokens are negative


def test_words_replace_the_first_image_between_its_boundaries() -> None:
    _, vision = ids(1, START, IMAGE, IMAGE, END, IMAGE, 2)
    assert in_place_of_image(vision, torch.tensor([50])).tolist() == [0, 1, -51, 4, 6]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_text_alone_equals_a_prompt_without_an_image(family: str) -> None:
    """As the processor writes the prompt without the image."""
    model, processor = families.build(family)
    inputs = families.inputs(family, ["abc"], [[families.image(1, (90, 40))]])
    row = inputs["input_ids"][0][inputs["attention_mask"][0].bool()]
    vision = torch.isin(row, torch.tensor(vision_token_ids(model.config)))
    around = edges(processor.tokenizer, of(model.config.model_type))
    text = processor.tokenizer.decode(row[without_image(row, vision, around)])
    marks = [token for token in families.SPECIAL if token not in ("<pad>", "<s>", "</s>") and "im_" not in token]
    assert "abc" in text
    assert [token for token in marks if token in text] == []
    assert "\n\n<" not in text
