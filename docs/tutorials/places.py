"""A benchmark in one file: does the description name the place of a generated scene?

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
    data_files = ("scenes.jsonl",)  # one object per line: "image_id", "file_name", "place", ...

    def load(self, data_dir):
        """Return the questions, with the place of each scene in `meta`."""
        rows = map(json.loads, self.files(data_dir)[0].read_text("utf-8").splitlines())
        folder = data_dir / "val2014"
        return [Item(str(r["image_id"]), self.prompt, (folder / r["file_name"],), {"place": r["place"]}) for r in rows]

    def score(self, items, answers):
        """Return the metrics and, for intervals and paired tests, their terms per item."""
        words = {i.id: answers[i.id].lower().replace(".", "").split() for i in items}
        terms = {
            "accuracy": {i.id: (float(i.meta["place"] in words[i.id]), 1.0) for i in items},
            "words": {i.id: (float(len(words[i.id])), 1.0) for i in items},
        }
        return Scores({name: ratio(units.values()) for name, units in terms.items()}, terms)
