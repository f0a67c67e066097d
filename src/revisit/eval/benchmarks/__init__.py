"""Benchmarks: one file each, with its data, prompts, scorer and metrics; the table of their names, and functions that find them."""

from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores, find, get, names, ratio, register, title

# A new benchmark is one line here.
BUILT_IN = {
    "amber": "revisit.eval.benchmarks.amber:Amber",
    "chair": "revisit.eval.benchmarks.chair:Chair",
    "eventhallusion": "revisit.eval.benchmarks.eventhallusion:EventHallusion",
    "hallusionbench": "revisit.eval.benchmarks.hallusionbench:HallusionBench",
    "llava_bench": "revisit.eval.benchmarks.llava_bench:LlavaBench",
    "mme": "revisit.eval.benchmarks.mme:MME",
    "mmhal": "revisit.eval.benchmarks.mmhal:MMHal",
    "mmmu": "revisit.eval.benchmarks.mmmu:MMMU",
    "mmvp": "revisit.eval.benchmarks.mmvp:MMVP",
    "moving": "revisit.eval.benchmarks.moving:MovingScenes",
    "naturalbench": "revisit.eval.benchmarks.naturalbench:NaturalBench",
    "yesno": "revisit.eval.benchmarks.own:OwnYesNo",
    "choice": "revisit.eval.benchmarks.own:OwnChoice",
    "captions": "revisit.eval.benchmarks.own:OwnCaptions",
    "phd": "revisit.eval.benchmarks.phd:PhD",
    "pope": "revisit.eval.benchmarks.pope:Pope",
    "repope": "revisit.eval.benchmarks.pope:RePope",
    "dash_b": "revisit.eval.benchmarks.pope:DashB",
    "videohallucer": "revisit.eval.benchmarks.videohallucer:VideoHallucer",
    "vidhal": "revisit.eval.benchmarks.vidhal:VidHal",
    "vqav2": "revisit.eval.benchmarks.vqav2:VQAv2",
}

__all__ = ["BUILT_IN", "Benchmark", "Item", "Metric", "Scores", "find", "get", "names", "ratio", "register", "title"]
