"""Benchmarks: one file each, with its data, its prompts and its scorer."""

from revisit.benchmarks.base import Benchmark, Item, Metric, Scores, get, names

__all__ = ["Benchmark", "Item", "Metric", "Scores", "get", "names"]
