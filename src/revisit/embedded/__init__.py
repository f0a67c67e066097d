"""The embedded model: a small vision-language model with its scenes, its training and its weights."""

from __future__ import annotations

from revisit.models.config import embedded_folder as path

__all__ = ["path"]
