"""A benchmark in one file: does the description name the place? It runs on generated scenes.

revisit eval --benchmark docs/tutorials/places.py:Places --method greedy,revisit --out runs/places
revisit compare runs/places
"""

import json

from revisit import Benchmark
from revisit.eval.benchmarks import Item, Metric, Scores, ratio


class Places(Benchmark):
    """`prompt` is an option: `places.py:Places:prompt=Where is this?`."""

    prompt: str = "Please describe this image in detail."

    name = "places"
    title = "Places"
    max_new_tokens = 40
    metrics = (Metric("accuracy", "higher", show=100, decimals=1), Metric("words", None, decimals=1))
    headline = "accuracy"
    data_files = ("scenes.jsonl",)  # {"image_id", "file_name", "place", ...} a line

    def load(self, data_dir):
        """The questions, with what scoring needs in `meta`."""
        rows = map(json.loads, self.files(data_dir)[0].read_text("utf-8").splitlines())
        folder = data_dir / "val2014"
        return [Item(str(r["image_id"]), self.prompt, (folder / r["file_name"],), {"place": r["place"]}) for r in rows]

    def score(self, items, answers):
        """Metrics, and their terms item by item, which give the intervals and the paired tests."""
        words = {i.id: answers[i.id].lower().replace(".", "").split() for i in items}
        terms = {
            "accuracy": {i.id: (float(i.meta["place"] in words[i.id]), 1.0) for i in items},
            "words": {i.id: (float(len(words[i.id])), 1.0) for i in items},
        }
        return Scores({name: ratio(units.values()) for name, units in terms.items()}, terms)
