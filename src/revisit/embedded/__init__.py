"""The embedded model: a small vision-language model with its scenes, its training and its weights."""

from __future__ import annotations

from revisit.models.loading import embedded_folder as path

__all__ = ["path"]
