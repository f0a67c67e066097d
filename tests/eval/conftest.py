"""A tiny model on disk for the tests of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

import families


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random LLaVA."""
    folder = tmp_path_factory.mktemp("model")
    for part in families.build("llava"):
        part.save_pretrained(folder)
    return folder
