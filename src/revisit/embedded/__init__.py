"""The models that come with the package, and the generated scenes."""

from revisit.models.config import embedded_folder as path  # noqa: F401
