"""The paper's tables and figures: what each one measures, on which models, and what it takes to measure it again.

Tables and figures are numbered in the order of the paper's source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from revisit.decoding.method import METHODS as registry
from revisit.errors import unknown

METHODS = ("greedy", "dola", "vcd", "m3id", "code", "sid", "revisit")
EVERY_METHOD = ("greedy", *(name for name in registry.names() if name not in ("greedy", "chain")))


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper: its Hub id and billions of parameters."""

    name: str
    hub: str
    billions: float

    @property
    def gigabytes(self) -> float:
        """The download, at two bytes a parameter."""
        return 2 * self.billions


# InternVL 2.5 is published in a format of its own: give a folder converted to transformers' format as NAME=FOLDER.
MODELS = {
    model.name: model
    for model in (
        PaperModel("LLaVA-1.5-7B", "llava-hf/llava-1.5-7b-hf", 7.1),
        PaperModel("Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B-Instruct", 8.3),
        PaperModel("InternVL3-8B", "OpenGVLab/InternVL3-8B-hf", 7.9),
        PaperModel("InternVL2.5-8B", "OpenGVLab/InternVL2_5-8B", 8.1),
        PaperModel("LLaVA-1.5-13B", "llava-hf/llava-1.5-13b-hf", 13.4),
        PaperModel("InternVL3-14B", "OpenGVLab/InternVL3-14B-hf", 15.1),
        PaperModel("InternVL2.5-26B", "OpenGVLab/InternVL2_5-26B", 25.5),
        PaperModel("Qwen2.5-VL-32B", "Qwen/Qwen2.5-VL-32B-Instruct", 33.5),
    )
}
THREE = ("LLaVA-1.5-7B", "Qwen2.5-VL-7B", "InternVL3-8B")
QWEN = ("Qwen2.5-VL-7B",)

Kind = Literal["grid", "ablation", "study", "methods"]


@dataclass(frozen=True)
class Row:
    """One table or figure of the paper.

    `items` are the questions each method is asked, `tokens` how long its answers are on average (177 for CHAIR is the paper's own
    count, the others are assumed), `passes` how often all of it is decoded.
    """

    key: str
    title: str
    where: str
    kind: Kind
    models: tuple[str, ...]
    benchmark: str
    items: int
    tokens: float
    methods: tuple[str, ...] = METHODS
    published: str = ""  # its table of published.json
    passes: int = 1
    data: str = ""  # what has to be downloaded
    disk: float = 0.1  # gigabytes of data
    further: tuple[str, ...] = ()  # other benchmarks of the row


COCO = "COCO val2014: annotations and 500 images"
ROWS = {
    row.key: row
    for row in (
        Row(
            "hallusionbench", "HallusionBench, visual-dependent part", "Table 2", "grid", THREE, "hallusionbench", 591, 60,
            published="hallusionbench", data="HallusionBench with its figures", disk=0.3,
        ),
        Row("chair", "CHAIR", "Table 3", "grid", THREE, "chair", 500, 177, published="chair", data=COCO, disk=0.4),
        Row(
            "pope", "POPE, mean over nine settings", "Table 4", "grid", THREE, "pope", 27_000, 10,
            published="pope", data="POPE's nine question files; 1,500 images of COCO and GQA", disk=0.6,
        ),
        Row(
            "pope-settings", "POPE, every source and setting", "Table 10", "grid", THREE, "pope", 27_000, 10,
            published="pope_full", data="as for pope", disk=0.6,
        ),
        Row(
            "vqav2", "VQAv2", "Table 5", "grid", THREE, "vqav2", 500, 15,
            published="vqav2", data="VQAv2 validation, 500 questions", disk=0.2,
        ),
        Row(
            "mmmu", "MMMU, mean over subjects", "Table 5", "grid", THREE, "mmmu", 857, 5,
            published="mmmu", data="MMMU validation", disk=0.4,
        ),
        Row(
            "mmmu-subjects", "MMMU, every subject", "Table 11", "grid", THREE, "mmmu", 857, 5,
            published="mmmu_subjects", data="as for mmmu", disk=0.4,
        ),
        Row(
            "models", "CHAIR across eight models", "Table 9", "grid", tuple(MODELS), "chair", 500, 177,
            methods=("greedy", "revisit"), published="chair_models", data=COCO, disk=0.4,
        ),
        Row(
            "latency", "Time per token", "Table 12", "study", THREE[:2], "chair", 300, 177,
            published="latency", passes=3, data=COCO, disk=0.4,
        ),
        Row(
            "ablation", "Ablations a to d", "Table 14, Figure 7", "ablation", QWEN, "chair", 500, 177,
            methods=("greedy", *("revisit",) * 24), published="ablation", data=COCO, disk=0.4,
        ),
        Row(
            "ablation-vqav2", "VQAv2 by layers and threshold", "Table 13", "ablation", ("Qwen2.5-VL-7B", "InternVL3-8B"), "vqav2", 500, 15,
            methods=("greedy", *("revisit",) * 8), published="ablation_vqav2", data="VQAv2 validation, 500 questions", disk=0.2,
        ),
        Row(
            "hallucinated-steps", "Recall of shown objects at hallucinated steps", "Table 6, Figure 3", "study", QWEN, "chair", 500, 177,
            methods=("greedy",), published="hallucinated_steps", passes=2, data=COCO, disk=0.4,
        ),
        Row(
            "gt-vs-hal", "GT against Hal, with Wilcoxon and Holm", "Tables 1 and 7", "study", QWEN, "chair", 500, 177,
            methods=("greedy",), published="gt_vs_hal", passes=2, data=COCO, disk=0.4,
        ),
        Row(
            "projection", "What single vision tokens predict", "Table 8, Figure 4", "study", QWEN, "chair", 500, 1,
            methods=("greedy",), published="projection", data=COCO, disk=0.4,
        ),
        Row(
            "token-tables", "Changed steps, candidate by candidate", "Tables 15 and 17", "study", THREE[:2], "chair", 60, 177,
            methods=("revisit",), data="images of LLaVA-Bench or COCO",
        ),
        Row(
            "methods", "Every method: CHAIR, POPE and time", "not in the paper", "methods", THREE[:1], "chair", 3_500, 48,
            methods=EVERY_METHOD, data=f"{COCO}; POPE's adversarial questions", disk=0.4, further=("pope",),
        ),
    )
}  # fmt: skip

# The thresholds that the paper's tables report; everywhere else its default of 1e-5 is used.
ALPHAS = {("vqav2", "Qwen2.5-VL-7B"): 1e-2, ("vqav2", "InternVL3-8B"): 1e-1}


def find(names: str) -> list[Row]:
    """Return the rows of these names, separated by commas; `all` for every one of the paper."""
    keys = [name.strip() for name in names.split(",") if name.strip()]
    if keys == ["all"]:
        return [row for row in ROWS.values() if row.kind != "methods"]
    for key in keys:
        if key not in ROWS:
            raise unknown("table", key, [*ROWS, "all"])
    return [ROWS[key] for key in keys]


def answers(row: Row, limit: int | None = None) -> int:
    """Return the number of answers that one model of a row takes."""
    return min(row.items, limit or row.items) * len(row.methods) * row.passes
