"""Tokenizers, and NLTK's data from beside the repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from word_tokenizers import train


@pytest.fixture(scope="session", params=["bytes", "metaspace"])
def tokenizer(request: Any) -> PreTrainedTokenizerFast:
    return train(request.param)


@pytest.fixture(scope="session")
def nltk_data(shared: Path) -> None:
    """NLTK's tokeniser, tagger and lemmatiser data."""
    os.environ.setdefault("NLTK_DATA", str(shared / "data" / "nltk_data"))
