"""Benchmarks: one file each, with its data, its prompts, its scorer and how its numbers are read."""

from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores, ratio
from revisit.eval.benchmarks.registry import find, get, names, register

__all__ = ["Benchmark", "Item", "Metric", "Scores", "find", "get", "names", "ratio", "register"]
