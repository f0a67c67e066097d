"""The models that come with the package: their weights, and the scenes they know."""

from revisit.models.config import embedded_folder as path

__all__ = ["path"]
