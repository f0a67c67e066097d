"""Benchmarks: one file each, with its data, prompts, scorer and metrics."""

from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores, find, get, names, ratio, register, title

__all__ = ["Benchmark", "Item", "Metric", "Scores", "find", "get", "names", "ratio", "register", "title"]
