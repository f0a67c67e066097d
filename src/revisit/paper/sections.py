"""Sections of a report: every study and every ablation as tables and figures, on request next to the published ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from revisit.benchmarks.base import Metric
from revisit.evaluation.records import Stored
from revisit.evaluation.store import slug
from revisit.paper import published
from revisit.paper.catalog import ROWS, Row
from revisit.paper.figures import Panel, Series, bars, curves
from revisit.report.comparisons import heading, p_value, ranked, stored_value
from revisit.report.document import Block, Cell, Provenance, Section, Table, Text

PROJECTION_KS = (1, 5, 10, 30)
ABLATION_TEXT = "Each panel varies some settings of ReVisiT and keeps the others at the main configuration."
STUDY_TEXT = (
    "Object words are CHAIR's synonyms of COCO categories that the model's tokenizer writes as one token; a word is "
    "ground truth (GT) for a picture if its category is in it, otherwise it is hallucinated (Hal)."
)


def percent(value: float | None, decimals: int = 2) -> str:
    """A share in percent, or a dash."""
    return number(None if value is None else 100 * value, decimals)


def number(value: float | None, decimals: int = 2) -> str:
    """A number, or a dash."""
    return "–" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def provenance(about: Stored) -> Provenance:
    """The command and settings of a study or an ablation."""
    kept = {k: v for k, v in about.get("settings", {}).items() if v is not None and not isinstance(v, (dict, list))}
    return Provenance(about.get("command") or "(not recorded)", ", ".join(f"{k} {v}" for k, v in kept.items()))


def interval(row: Mapping[str, float], decimals: int) -> str:
    """[low, high] in percent."""
    return f"[{percent(row['low'], decimals)}, {percent(row['high'], decimals)}]"


# -- studies -------------------------------------------------------------------------------------------------------


def study_section(study: Stored, with_published: bool = False) -> Section:
    """A study's file as a section; `with_published` adds the paper's tables."""
    title, blocks_of = STUDIES[study["study"]]
    about = study["settings"]
    blocks = blocks_of(study["result"], study.get("name") or study["study"])
    row = ROWS.get("token-tables" if study["study"] == "case-study" else study["study"])
    if with_published and row is not None:
        blocks += published_tables(row)
    return Section(f"{title} · {about['model']} · {about['data']}", [*blocks, provenance(study)], level=3)


def study_sections(studies: Iterable[Stored], with_published: bool) -> list[Section]:
    """All studies in the order of `STUDIES`."""
    order = list(STUDIES)
    found = sorted(studies, key=lambda study: order.index(study["study"]))
    sections = [study_section(study, with_published) for study in found]
    return [Section("Analyses", [Text(STUDY_TEXT)]), *sections] if sections else []


def _counted(result: Stored) -> str:
    words = result["vocabulary"]
    return (
        f"{result['captions']} captions, {result['hallucinated_captions']} of them with a hallucinated object; object "
        f"vocabulary: {words['words']} words of {words['categories']} categories. "
    )


def _curve(label: str, rows: Sequence[Mapping[str, float]]) -> Series:
    """Recall@k in percent with its interval."""
    values = {key: [100 * row[key] for row in rows] for key in ("recall", "low", "high")}
    return Series(label, values["recall"], [row["k"] for row in rows], values["low"], values["high"])


def _steps(result: Stored, name: str) -> list[Block]:
    chosen = result["selection"]
    text = (
        f"{_counted(result)}{chosen['hallucinated']} hallucinated mentions among {chosen['mentions']}, {chosen['kept']} kept "
        f"({chosen['word of several tokens']} are not one token, {chosen['no ground-truth word']} have no single-token "
        "ground-truth word)."
    )
    if result["greedy_agreement"] is not None:
        share = percent(result["greedy_agreement"], 1)
        text += f" Teacher forcing gives the written token as the likeliest at {share} % of the kept steps."
    if not result["recall"]:
        return [Text(text + " There is no step to measure.")]
    units, size = result["recall"][0]["units"], result["vocabulary"]["full"]
    lines = [
        (f"top-{row['k']:g}", f"{100 * row['k'] / size:.2g} %", f"{percent(row['recall'], 1)} %", interval(row, 1))
        for row in result["recall"]
    ]
    heads = ("Top-k", "of vocabulary", "recall@k", "95 % interval")
    caption = (
        f"At-least-one recall of ground-truth words at {units:,} hallucinated steps, the likeliest token left out."
    )
    blocks: list[Block] = [Text(text), Table(heads, lines, caption)]
    panel = Panel([_curve("a shown object's word in the top k", result["curve"])], "", "k", "recall@k (%)", log=True)
    caption = f"At-least-one recall@k at {units:,} hallucinated steps, with 95 % Wilson intervals."
    return [*blocks, curves(name, caption, [panel])]


def _pointing(result: Stored, name: str) -> list[Block]:
    """A table by setting and one by layer; the paper has no such study."""

    def table(rows: Sequence[Stored], head: str, caption: str) -> Table:
        def share(found: Mapping[str, float | None]) -> Cell:
            return Cell(percent(found["share"], 1), small="" if found["low"] is None else interval(found, 1))  # type: ignore[arg-type]

        heads = (head, "steps", "touches (%)", "by chance", "middle inside (%)", "by chance")
        measures = ("touches", "touches_chance", "inside", "inside_chance")
        lines: list[tuple[Cell | str, ...]] = [
            (str(row[head.lower()]), str(row["steps"]), *(share(row[m]) for m in measures)) for row in rows
        ]
        return Table(heads, lines, caption)

    text = (
        f"{result['pictures']} pictures. A step counts if the written token is the word of a boxed object; the selected patch "
        "touches one of its boxes, or has its middle inside one. By chance: the share of all patches that do. Brackets: "
        "95 % intervals over pictures."
    )
    by_layer = "The nearest patch of each layer alone, at the steps of a decode over every layer."
    settings = table(result["settings"], "Setting", "The selected patch, by setting.")
    return [Text(text), settings, table(result["layers"], "Layer", by_layer)]


def _grounding(result: Stored, name: str) -> list[Block]:
    text = "Averages of the largest probability (%) of a shown (GT) and of an absent (Hal) object's word, over the object words."
    blocks: list[Block] = [Text(_counted(result) + text), _max_table(result["rows"]), _wilcoxon_table(result["rows"])]
    rows = [row for row in result["rows"] if row["n"]]
    kinds = {"gt_with": "GT, with image", "hal_with": "Hal, with image"}
    kinds |= {"gt_without": "GT, without", "hal_without": "Hal, without"}
    series = [Series(label, [row[key] for row in rows]) for key, label in kinds.items()]
    caption = "GT Max Avg and Hal Max Avg over the object words, with the image and without it (teacher forcing)."
    labels = [row["setting"].replace(" in ", "\nin ") for row in rows]
    return [*blocks, bars(name, caption, labels, [Panel(series, xlabel="average maximum (%)")])]


def _max_table(rows: Sequence[Stored]) -> Table:
    lines = []
    for row in rows:
        for condition, key in (("with image", "with"), ("without image", "without")):
            gt, hal = row[f"gt_{key}"], row[f"hal_{key}"]
            known = gt is not None and hal is not None
            lines.append(
                (
                    row["setting"],
                    condition,
                    f"{row['n']:,}",
                    Cell(number(gt), int(known and gt > hal)),
                    Cell(number(hal), int(known and hal > gt)),
                )
            )
    return Table(
        ("Tokens", "Condition", "N", "GT Max Avg", "Hal Max Avg"),
        lines,
        "GT Max Avg and Hal Max Avg (%); the larger is bold.",
        left=2,
    )


def _wilcoxon_table(rows: Sequence[Stored]) -> Table:
    quantities = ("with_image", "without_image", "delta")
    return Table(
        ("Tokens", "N", *("median", "p (Holm)") * 3),
        [
            (
                row["setting"],
                f"{row['n']:,}",
                *(text for q in quantities for text in (number(row[q]["median"], 3), p_value(row[q]["p_holm"]))),
            )
            for row in rows
        ],
        "Wilcoxon signed-rank tests (two-sided, Pratt) of d = GT − Hal with the image, without it, and of their difference Δ; "
        "medians in points of percent, Holm's correction over the three sets of tokens.",
        groups=(("", 1), ("d with image", 2), ("d without image", 2), ("Δ", 2)),
    )


def _projection(result: Stored, name: str) -> list[Block]:
    kinds = {"full": "whole vocabulary", "objects": "object words"}
    last = next(row for row in result["layers"] if row["layer"] == result["final_layer"] and row["norm"])
    chance = {row["k"]: row["recall"] for row in result["chance"]}
    lines: list[list[Cell | str]] = []
    for k in PROJECTION_KS:
        found = [next(row for row in last[kind] if row["k"] == k) for kind in kinds]
        shares = [Cell(f"{percent(row['recall'])} %", small=interval(row, 2)) for row in found]
        lines.append([f"top-{k}", *shares, f"{percent(chance.get(k))} %"])
    text = (
        f"{result['tokens']:,} vision tokens of {result['images']} pictures; a hit is a word for any object of the "
        f"picture. Whole vocabulary: {result['vocabulary']['full']:,} tokens; object vocabulary: "
        f"{result['vocabulary']['words']} words of {result['vocabulary']['categories']} categories."
    )
    caption = "At-least-one recall@k of single vision tokens at the final layer, with 95 % Wilson intervals."
    heads = ("Top-k", *kinds.values(), "object words, random order")
    blocks: list[Block] = [Text(text), Table(heads, lines, caption)]
    ordered = [_curve(label, last[kind]) for kind, label in kinds.items()]
    ordered.append(Series("object words, random order", [100 * y for y in chance.values()], list(chance)))
    by_layer = [
        Series(
            f"{label}, {'final norm' if norm else 'no norm'}",
            [100 * row[kind][0]["recall"] for row in result["layers"] if row["norm"] is norm],
            [row["layer"] for row in result["layers"] if row["norm"] is norm],
        )
        for kind, label in kinds.items()
        for norm in (True, False)
    ]
    panels = [
        Panel(ordered, "final layer", "k", "recall@k (%)", log=True),
        Panel(by_layer, "by layer", "hidden state (0: projector output)", "recall@1 (%)"),
    ]
    caption = (
        f"Single vision tokens ({result['tokens']:,}) read through the LM head: recall@k of a word for an object of the "
        "picture at the final layer (left), and recall@1 at every hidden state (right)."
    )
    blocks.append(curves(name, caption, panels))
    layers = []
    for row in result["layers"]:
        cells = [next(r for r in row[kind] if r["k"] == k) for kind in kinds for k in (1, 10)]
        layers.append((str(row["layer"]), "final" if row["norm"] else "none", *(percent(c["recall"]) for c in cells)))
    caption = "Recall (%) by hidden state, with the decoder's final norm and without it (0 is the projector's output)."
    heads, groups = ("Hidden state", "Norm", *("@1", "@10") * 2), [(label, 2) for label in kinds.values()]
    return [*blocks, Table(heads, layers, caption, groups, left=2, folded=len(layers) > 20)]


def _vision_words(result: Stored, name: str) -> list[Block]:
    lines = [
        (
            row["word"],
            *(f"{value:.2f}" for token in row["tokens"] for kind in ("full", "words") for value in token[kind]),
        )
        for row in result["rows"]
    ]
    heads = ("Word", *("log-prob", "%", "log-prob", "%") * len(result["tokens"]))
    caption = (
        f"Picture {result['image']}, which shows {', '.join(result['ground_truth'])}. Of each token first over the whole "
        "vocabulary, then among these words."
    )
    return [Table(heads, lines, caption, groups=[(f"vision token {token}", 4) for token in result["tokens"]])]


def _cases(result: Stored, name: str) -> list[Block]:
    changed = sum(result["changes"].values())
    blocks: list[Block] = [
        Text(
            f"{result['steps']:,} steps over {result['images']} pictures, {changed:,} of them changed. What the model alone "
            "would have written, and what was written instead, by kind of word: shown (names something in the picture), "
            "absent (names something that is not), other."
        ),
        Table(
            ("Change", "steps", "share of changes"),
            [(kind, f"{n:,}", f"{percent(n / changed, 1)} %") for kind, n in result["changes"].items()],
            "Changed steps by kind.",
        ),
    ]
    for case in result["cases"]:
        place = (
            f"layer {case['layer']}, vision token {case['vision_token']}"
            if case["layer"] is not None
            else "no vision token"
        )
        blocks.append(
            _case_table(
                case["rows"],
                f"Picture {case['image']}, step {case['step']} after “…{case['so_far'][-60:]}” ({case['change']}; {place}; "
                f"{case['set_size']} plausible tokens). In the picture: {', '.join(case['ground_truth'])}.",
            )
        )
    return blocks


def _case_table(rows: Sequence[Stored], caption: str) -> Table:
    def shown(pair: Sequence[float]) -> tuple[str, str]:
        return ("−∞" if pair[0] <= -998 else f"{pair[0]:.2f}", f"{pair[1]:.2f}")

    lines = [
        (str(rank), row["token"], *shown(row["base"]), *shown(row["vision"]), *shown(row["final"]))
        for rank, row in enumerate(rows, 1)
    ]
    return Table(
        ("Rank", "Token", *("log-prob", "%") * 3),
        lines,
        caption,
        groups=(("base", 2), ("vision token", 2), ("final", 2)),
        left=2,
    )


def _latency(result: Stored, name: str) -> list[Block]:
    rows, protocol = result["rows"], result["protocol"]
    base = next((row["ms"] for row in rows if row["method"] == "greedy"), rows[0]["ms"])
    lines = [
        (
            published.NAMES.get(row["method"], row["method"]),
            f"{number(row['ms'])} ± {number(row['sd'])}",
            f"{number(row['ms'] / base)}×" if row["ms"] and base else "–",
            f"{row['first']:.1f} ± {row['first_sd']:.1f}",
        )
        for row in rows
    ]
    caption = (
        f"Milliseconds per token without the prefill, mean ± deviation over {result['images']} pictures "
        f"({protocol['warmups']} warm-ups, {protocol['repeats']} repeats of each; methods take turns)."
    )
    return [Table(("Method", "ms/token", "to greedy", "first token, ms"), lines, caption)]


def _check(result: Stored, name: str) -> list[Block]:
    """One row per candidate, measured on the second half of the pictures; the paper has no such study."""
    lines = [
        (
            row["name"],
            number(row["validation"], 3),
            *(
                text
                for kind in ("captions", "foils")
                for text in (
                    f"{number(row[kind]['auroc'], 3)} [{number(row[kind]['low'], 3)}, {number(row[kind]['high'], 3)}]",
                    number(row[kind]["ap"], 3),
                    number(row[kind]["f1"], 3),
                )
            ),
        )
        for row in result["rows"]
    ]
    measured = {kind: result["check"][kind] for kind in ("captions", "foils")}
    counts = " and ".join(f"{m['words']} object words of {kind}, {m['absent']} absent" for kind, m in measured.items())
    caption = (
        f"How well a number tells present from absent objects: {counts}, in the second half of {result['pictures']} pictures. The first "
        f"half sets each threshold of F1 and chooses: {result['chosen']}. AUROC with 95 % intervals over pictures."
    )
    heads = ("Number", "validation AUROC", *("AUROC", "average precision", "F1") * 2)
    groups = (("", 1), ("captions", 3), ("foils", 3))
    table = Table(
        heads, lines, caption, groups, frozenset([[r["name"] for r in result["rows"]].index(result["chosen"])])
    )
    cuts = [
        (f"{kind}: {rule}", number(m["thresholds"][rule], 4), number(m["f1"][rule], 3), number(m["auroc"], 3))
        for kind, m in measured.items()
        for rule in m["thresholds"]
    ]
    about = f"`revisit.check` as it is (layer {result['settings']['layer']} of {result['depth']}), by how its threshold is set."
    several = ", ".join(f"{rule} {number(v, 3)}" for rule, v in result["several_tokens"].items() if rule != "words")
    note = f"Words of several tokens: {result['several_tokens']['words']}" + (f"; AUROC {several}." if several else ".")
    return [table, Table(("Threshold", "value", "F1", "AUROC"), cuts, about), Text(note)]


# Every study that is stored, in the order of the report: its title and the function that draws it.
STUDIES: dict[str, tuple[str, Callable[[Stored, str], list[Block]]]] = {
    "latency": ("Latency", _latency),
    "hallucinated-steps": ("Ground-truth words at hallucinated steps", _steps),
    "gt-vs-hal": ("GT and Hal probabilities, with and without the image", _grounding),
    "projection": ("What single vision tokens say", _projection),
    "vision-words": ("Three vision tokens, word by word", _vision_words),
    "pointing": ("Does the selected patch lie on the object?", _pointing),
    "case-study": ("Case studies", _cases),
    "check": ("Which words does the picture support?", _check),
}


# -- the paper's own tables ----------------------------------------------------------------------------------------


def published_tables(row: Row) -> list[Table]:
    """What the paper prints in one of its tables, a column for each key of the data."""
    data = published.table(row.published)
    several = isinstance(data, list) and "rows" in data[0]  # token tables, one for each step
    tables = []
    for part in data if several else [data]:
        about = {key: value for key, value in part.items() if isinstance(value, str | int)} if "model" in part else {}
        if isinstance(part, list):
            rows = part
        elif about:
            rows = part["rows"] if "rows" in part else part["recall"]
        else:  # values by model and method
            rows = [
                {"model": model, "method": published.NAMES[method], **values}
                for model, methods in part.items()
                for method, values in methods.items()
            ]
        settings = "".join(f", {key.replace('_', ' ')} {_printed(value)}" for key, value in about.items())
        tables.append(printed_table(rows, f"{row.title} ({row.where}){settings}.", 1 if about else 2))
    return tables


def printed_table(rows: Sequence[Stored], caption: str, left: int) -> Table:
    """Rows of the paper's data as they are."""
    heads = [key.replace("_", " ") for key in rows[0]]
    lines = [tuple(_printed(value) for value in row.values()) for row in rows]
    return Table(heads, lines, caption, left=left, published=True, folded=len(lines) > 16)


def _printed(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_printed(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_printed, value))
    return value if isinstance(value, str) else f"{value:,}"


# -- ablations -----------------------------------------------------------------------------------------------------


def ablation_sections(about: Stored, results: Stored, name: str, with_published: bool = False) -> list[Section]:
    """Every panel of an ablation, for each model and benchmark it was run on."""
    groups: dict[tuple[str, str], dict[str, Stored]] = {}
    for cell in results["cells"]:
        if cell["status"] == "complete":
            key = (cell["model"]["name"], cell["benchmark"]["label"])
            groups.setdefault(key, {})[cell["method"]["label"]] = cell
    sections = []
    for (model, benchmark), cells in groups.items():
        for panel in about["panels"]:
            if not all(row["method"] in cells for row in panel["rows"]):
                continue
            blocks = _panel(panel, cells, f"{name}-{slug(panel['key'])}-{slug(benchmark)}-{slug(model)}")
            if with_published:
                blocks[1:1] = _published_panel(panel, benchmark.partition("(")[0])
            named = panel["title"] if panel["title"] == panel["key"] else f"({panel['key']}) {panel['title']}"
            title = f"{named} · {benchmark} · {model}"
            sections.append(Section(title, [*blocks, provenance(panel.get("made") or about)], level=3))
    return sections


def chosen_metrics(cell: Stored) -> list[Metric]:
    """The metrics of a cell that have a direction, sub-settings left out."""
    records = cell["metrics"].items()
    return [Metric.from_record(name, found) for name, found in records if "/" not in name and found["better"]]


def _panel(panel: Stored, cells: Mapping[str, Stored], name: str) -> list[Block]:
    rows = panel["rows"]
    own = [cells[row["method"]] for row in rows]
    metrics = chosen_metrics(own[0])
    columns = [ranked(own, metric, intervals=True) for metric in metrics]
    lines: list[list[Cell | str]] = [[*row["cells"], *(c[n] for c in columns)] for n, row in enumerate(rows)]
    greedy = cells.get("greedy")
    if greedy is not None:
        values = [ranked([greedy], metric)[0] for metric in metrics]
        lines.append(["greedy", *[""] * (len(panel["columns"]) - 1), *values])
    main = [" ".join(row["cells"]) for row in rows if row["main"]]
    caption = f"Best in bold, second underlined, 95 % intervals in brackets; {own[0]['answers']} items."
    table = Table(
        (*panel["columns"], *(heading(m) for m in metrics)),
        lines,
        caption + (f" Main configuration: {main[0]}." if main else ""),
        marked=frozenset(place for place, row in enumerate(rows) if row["main"]),
        left=len(panel["columns"]),
    )
    return [table, _panel_figure(panel, cells, metrics, name)]


def _panel_figure(panel: Stored, cells: Mapping[str, Stored], metrics: Sequence[Metric], name: str) -> Block:
    """Curves over alpha where it varies, one for each value of the other settings; otherwise bars."""
    sweep = "alpha" in panel["settings"] and len(panel["rows"]) > 3
    at = panel["settings"].index("alpha") if sweep else -1
    lines: dict[str, list[Stored]] = {}
    for row in panel["rows"]:
        others = ", ".join(text for place, text in enumerate(row["cells"]) if place != at)
        lines.setdefault(others if sweep and others else "ReVisiT", []).append(row)
    panels = []
    known = [m for m in metrics if m.name in ("CHAIRi", "F1", "accuracy", "macro", "token_max", "qAcc")]
    for metric in (known or metrics)[:3]:
        series = []
        for label, rows in lines.items():
            found = [stored_value(cells[row["method"]], metric) for row in rows]
            y, low, high = ([values[place] for values in found] for place in range(3))
            series.append(Series(label, y, [float(row["values"][at]) for row in rows] if sweep else (), low, high))
        greedy = stored_value(cells["greedy"], metric)[0] if "greedy" in cells else None
        panels.append(Panel(series, heading(metric), "α" if sweep else "", log=sweep, baseline=greedy))
    caption = f"{panel['title']}; with 95 % intervals, the dashed line is plain decoding."
    if sweep:
        return curves(name, caption, panels)
    return bars(name, caption, [" · ".join(filter(None, row["cells"])) for row in panel["rows"]], panels)


def _published_panel(panel: Stored, benchmark: str) -> list[Table]:
    """The paper's values of a panel: CHAIR's four, and VQAv2 by layers and threshold."""
    paper = published.table("ablation")
    if benchmark == "chair" and panel["key"] in paper["panels"]:
        rows = paper["panels"][panel["key"]]
        return [printed_table(rows, f"{paper['model']}, CHAIR, 500 pictures.", len(panel["settings"]))]
    by_threshold = benchmark == "vqav2" and panel["settings"] == ["layers", "alpha"]
    return published_tables(ROWS["ablation-vqav2"]) if by_threshold else []
