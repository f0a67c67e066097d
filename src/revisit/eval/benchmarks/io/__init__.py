"""The data of benchmarks: where it is, and how it is downloaded."""

from importlib import resources


def packaged(name: str) -> str:
    """Return the text of a file that the benchmarks bring, in `data`."""
    return resources.files("revisit.eval.benchmarks").joinpath("data", name).read_text("utf-8")
