"""Tokenizers of two kinds."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from word_tokenizers import train


@pytest.fixture(scope="session", params=["bytes", "metaspace"])
def tokenizer(request: Any) -> PreTrainedTokenizerFast:
    return train(request.param)
