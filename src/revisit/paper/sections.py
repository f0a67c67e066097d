"""Sections of a report: each study and each ablation as tables and figures, published figures beside them on request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from revisit.benchmarks.base import Metric
from revisit.evaluation.comparison import ranks
from revisit.evaluation.store import slug
from revisit.paper import figures, published
from revisit.report.comparisons import heading, p_value
from revisit.report.document import Block, Cell, Made, Section, Table, Text, rows_of

PROJECTION_KS = (1, 5, 10, 30)


def percent(value: float, decimals: int = 2) -> str:
    """A share as percent; nothing to say is a dash."""
    return "–" if value is None or math.isnan(value) else f"{100 * value:.{decimals}f}"


def number(value: float | None, decimals: int = 2) -> str:
    """A number, or a dash."""
    return "–" if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def made(about: Mapping[str, Any]) -> Made:
    """The command and settings of a study or an ablation."""
    kept = {k: v for k, v in about.get("settings", {}).items() if v is not None and not isinstance(v, (dict, list))}
    return Made(about.get("command") or "(not recorded)", ", ".join(f"{k} {v}" for k, v in kept.items()))


def interval(row: Mapping[str, float], decimals: int) -> str:
    """[low, high] in percent."""
    return f"[{percent(row['low'], decimals)}, {percent(row['high'], decimals)}]"


# -- studies -------------------------------------------------------------------------------------------------------


def study_section(study: Mapping[str, Any], beside: bool = False) -> Section:
    """A study's file as a section."""
    writers = {
        "hallucinated-steps": ("Ground-truth words at hallucinated steps", _steps),
        "gt-vs-hal": ("GT and Hal probabilities, with and without the image", _grounding),
        "projection": ("What single vision tokens say", _projection),
        "vision-words": ("Three vision tokens, word by word", _vision_words),
        "case-study": ("Case studies", _cases),
        "pointing": ("Does the selected patch lie on the object?", _pointing),
    }
    title, writer = writers[study["study"]]
    about = study["settings"]
    blocks = writer(study["result"], study.get("name") or study["study"], beside)
    return Section(f"{title} · {about['model']} · {about['data']}", [*blocks, made(study)], level=3)


def _steps(result: dict[str, Any], name: str, beside: bool) -> list[Block]:
    chosen = result["selection"]
    text = (
        f"{result['captions']} captions, {result['hallucinated_captions']} of them with a hallucinated object; "
        f"{chosen['hallucinated']} hallucinated mentions among {chosen['mentions']}, {chosen['kept']} kept "
        f"({chosen['word of several tokens']} are not one token, {chosen['no ground-truth word']} have no single-token "
        f"ground-truth word). Object vocabulary: {result['vocabulary']['words']} words of "
        f"{result['vocabulary']['categories']} categories."
    )
    if result["greedy_agreement"] is not None:
        share = percent(result["greedy_agreement"], 1)
        text += f" Teacher forcing gives the written token as the likeliest at {share} % of the kept steps."
    if not result["recall"]:
        return [Text(text + " There is no step to measure.")]
    size = result["vocabulary"]["full"]
    rows = [
        (f"top-{row['k']}", f"{100 * row['k'] / size:.2g} %", Cell(f"{percent(row['recall'], 1)} %"), interval(row, 1))
        for row in result["recall"]
    ]
    blocks: list[Block] = [
        Text(text),
        Table(
            ("Top-k", "of vocabulary", "recall@k", "95 % Wilson interval"),
            rows_of(rows),
            f"At-least-one recall of ground-truth words at hallucinated steps (n = {result['recall'][0]['units']}), "
            "the likeliest token left out.",
        ),
    ]
    if beside:
        paper = published.table("hallucinated_steps")
        blocks.append(
            Table(
                ("Top-k", "recall@k", "95 % interval"),
                rows_of(
                    [
                        (f"top-{r['k']}", f"{r['recall']:.1f} %", f"[{r['low']:.1f}, {r['high']:.1f}]")
                        for r in paper["recall"]
                    ]
                ),
                f"{paper['model']}, n = {paper['n']}, vocabulary of {paper['vocabulary']:,}.",
                published=True,
            )
        )
    blocks.append(figures.step_recall(name, result))
    return blocks


def _pointing(result: dict[str, Any], name: str, beside: bool) -> list[Block]:
    """One table by setting, one by layer; shares in percent with 95 % intervals over pictures."""

    def table(rows: Sequence[dict[str, Any]], head: str, caption: str) -> Table:
        def share(row: dict[str, Any], measure: str) -> Cell | str:
            found = row[measure]
            if found["share"] is None:
                return "–"
            return Cell(percent(found["share"], 1), small="" if found["low"] is None else interval(found, 1))

        heads = (head, "steps", "touches (%)", "by chance", "middle inside (%)", "by chance")
        measures = ("touches", "touches_chance", "inside", "inside_chance")
        key = head.lower()
        made = [(str(row[key]), str(row["steps"]), *(share(row, m) for m in measures)) for row in rows]
        return Table(heads, rows_of(made), caption)

    return [
        Text(
            f"{result['pictures']} pictures. A step counts where the written token is the word of a boxed object; the selected patch "
            "touches one of its boxes, or has its middle inside one. By chance: the share of all patches that do. Brackets: "
            "95 % intervals over pictures."
        ),
        table(result["settings"], "Setting", "The selected patch, by setting."),
        table(
            result["layers"],
            "Layer",
            "The nearest patch of each layer alone, at the steps of a decode over every layer.",
        ),
    ]


def _grounding(result: dict[str, Any], name: str, beside: bool) -> list[Block]:
    blocks: list[Block] = [
        Text(
            f"{result['captions']} captions, {result['hallucinated_captions']} of them with a hallucinated object; "
            f"{result['vocabulary']['words']} object words of {result['vocabulary']['categories']} categories. "
            "Averages of the largest probability (%) of a shown (GT) and of an absent (Hal) object's word, over the object words."
        ),
        _max_table(result["rows"], False, ""),
    ]
    if beside:
        paper = published.table("gt_vs_hal")
        blocks.append(_max_table(paper["rows"], True, f"{paper['model']}. "))
    blocks.append(_wilcoxon_table(result["rows"]))
    if beside:
        blocks.append(
            Table(
                ("Setting", "N", "median d with", "median d without", "median Δ", "p (Holm) on Δ"),
                rows_of(
                    [
                        (
                            r["setting"],
                            f"{r['n']:,}",
                            *(number(r[f"median_{q}"], 3) for q in ("with", "without", "delta")),
                            r["p_holm"],
                        )
                        for r in published.table("gt_vs_hal")["rows"]
                    ]
                ),
                "Wilcoxon signed-rank tests.",
                published=True,
            )
        )
    blocks.append(figures.grounding_bars(name, result))
    return blocks


def _max_table(rows: Sequence[Mapping[str, Any]], is_published: bool, head: str) -> Table:
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
        rows_of(lines),
        head + "GT Max Avg and Hal Max Avg (%); the larger is bold.",
        left=2,
        published=is_published,
    )


def _wilcoxon_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    quantities = ("with_image", "without_image", "delta")
    return Table(
        ("Tokens", "N", *("median", "p (Holm)") * 3),
        rows_of(
            [
                (
                    row["setting"],
                    f"{row['n']:,}",
                    *(text for q in quantities for text in (number(row[q]["median"], 3), p_value(row[q]["p_holm"]))),
                )
                for row in rows
            ]
        ),
        "Wilcoxon signed-rank tests (two-sided, Pratt) of d = GT − Hal with the image, without it, and of their difference Δ; "
        "medians in points of percent, Holm's correction over the three sets of tokens.",
        groups=(("", 1), ("d with image", 2), ("d without image", 2), ("Δ", 2)),
    )


def _projection(result: dict[str, Any], name: str, beside: bool) -> list[Block]:
    final = result["final_layer"]
    last = next(row for row in result["layers"] if row["layer"] == final and row["norm"])
    words = result["vocabulary"]["words"]
    rows = []
    for k in PROJECTION_KS:
        full, objects = (next(r for r in last[key] if r["k"] == k) for key in ("full", "objects"))
        chance = next((r["recall"] for r in result["chance"] if r["k"] == k), math.nan)
        rows.append(
            (
                f"top-{k}",
                Cell(f"{percent(full['recall'])} %", small=interval(full, 2)),
                Cell(f"{percent(objects['recall'])} %", small=interval(objects, 2)),
                f"{percent(chance)} %",
            )
        )
    blocks: list[Block] = [
        Text(
            f"{result['tokens']:,} vision tokens of {result['images']} pictures; a hit is a word for any object of the "
            f"picture. Whole vocabulary: {result['vocabulary']['full']:,} tokens; object vocabulary: {words} words of "
            f"{result['vocabulary']['categories']} categories."
        ),
        Table(
            ("Top-k", "whole vocabulary", "object words", "object words, random order"),
            rows_of(rows),
            "At-least-one recall@k of single vision tokens at the final layer, with 95 % Wilson intervals.",
        ),
    ]
    if beside:
        paper = published.table("projection")
        blocks.append(
            Table(
                ("Top-k", "whole vocabulary", "object words"),
                rows_of(
                    [
                        (
                            f"top-{r['k']}",
                            *(
                                Cell(f"{r[key][0]:.2f} %", small=f"[{r[key][1]:.2f}, {r[key][2]:.2f}]")
                                for key in ("full", "objects")
                            ),
                        )
                        for r in paper["recall"]
                    ]
                ),
                f"{paper['model']}, {paper['tokens']:,} vision tokens, {paper['words']} object words.",
                published=True,
            )
        )
    blocks.append(figures.projection_recall(name, result))
    lines = []
    for row in result["layers"]:
        cells = [next(r for r in row[key] if r["k"] == k) for key in ("full", "objects") for k in (1, 10)]
        lines.append((str(row["layer"]), "final" if row["norm"] else "none", *(percent(c["recall"]) for c in cells)))
    blocks.append(
        Table(
            ("Hidden state", "Norm", "@1", "@10", "@1", "@10"),
            rows_of(lines),
            "Recall (%) by hidden state, with the decoder's final norm and without it (0 is the projector's output).",
            groups=(("whole vocabulary", 2), ("object words", 2)),
            left=2,
            folded=len(lines) > 20,
        )
    )
    return blocks


def _vision_words(result: dict[str, Any], name: str, beside: bool) -> list[Block]:
    """Our tokens, and the published ones."""
    caption = f"Picture {result['image']}, which shows {', '.join(result['ground_truth'])}."
    blocks: list[Block] = [_word_table(result["rows"], [f"vision token {t}" for t in result["tokens"]], caption)]
    if beside:
        told = published.table("vision_words")
        tokens = [f"{place} token" for place in told["tokens"]]
        blocks.append(
            _word_table(told["rows"], tokens, f"{told['model']}, words for an environment.", is_published=True)
        )
    return blocks


def _word_table(
    rows: Sequence[Mapping[str, Any]], tokens: Sequence[str], caption: str, is_published: bool = False
) -> Table:
    lines = [
        (
            row["word"],
            *(f"{value:.2f}" for token in row["tokens"] for kind in ("full", "words") for value in token[kind]),
        )
        for row in rows
    ]
    return Table(
        ("Word", *("log-prob", "%", "log-prob", "%") * len(tokens)),
        rows_of(lines),
        f"{caption} Of each token first over the whole vocabulary, then among these words.",
        groups=tuple((token, 4) for token in tokens),
        published=is_published,
    )


def _cases(result: dict[str, Any], name: str, beside: bool) -> list[Block]:
    changed = sum(result["changes"].values())
    blocks: list[Block] = [
        Text(
            f"{result['steps']:,} steps over {result['images']} pictures, {changed:,} of them changed. What the model alone "
            "would have written, and what was written instead, by kind of word: shown (names something in the picture), "
            "absent (names something that is not), other."
        ),
        Table(
            ("Change", "steps", "share of changes"),
            rows_of([(kind, f"{n:,}", f"{percent(n / changed, 1)} %") for kind, n in result["changes"].items()]),
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
    if beside:
        for case in published.table("cases"):
            blocks.append(
                _case_table(
                    case["rows"][:20],
                    f"{case['model']}, “{case['prompt']}”, step {case['step']}, vision token {case['vision_token']} "
                    f"({min(20, len(case['rows']))} of {len(case['rows'])} rows).",
                    is_published=True,
                )
            )
    return blocks


def _case_table(rows: Sequence[Mapping[str, Any]], caption: str, is_published: bool = False) -> Table:
    def shown(pair: Sequence[float]) -> tuple[str, str]:
        return ("−∞" if pair[0] <= -998 else f"{pair[0]:.2f}", f"{pair[1]:.2f}")

    lines = [
        (str(rank), row["token"], *shown(row["base"]), *shown(row["vision"]), *shown(row["final"]))
        for rank, row in enumerate(rows, 1)
    ]
    return Table(
        ("Rank", "Token", *("log-prob", "%") * 3),
        rows_of(lines),
        caption,
        groups=(("base", 2), ("vision token", 2), ("final", 2)),
        left=2,
        published=is_published,
    )


# -- ablations -----------------------------------------------------------------------------------------------------


def ablation_sections(
    about: Mapping[str, Any], results: Mapping[str, Any], name: str, beside: bool = False
) -> list[Section]:
    """Every panel of an ablation, for each model and benchmark it was run on."""
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for cell in results["cells"]:
        if cell["status"] == "complete":
            key = (cell["model"]["name"], cell["benchmark"]["name"])
            groups.setdefault(key, {})[cell["method"]["label"]] = cell
    sections = []
    for (model, benchmark), cells in groups.items():
        for panel in about["panels"]:
            if not all(row["method"] in cells for row in panel["rows"]):
                continue
            blocks = _panel(panel, cells, f"{name}-{slug(panel['key'])}-{slug(benchmark)}-{slug(model)}")
            if beside and benchmark == "chair" and panel["key"] in published.table("ablation")["panels"]:
                blocks.insert(1, _published_panel(panel))
            named = panel["title"] if panel["title"] == panel["key"] else f"({panel['key']}) {panel['title']}"
            title = f"{named} · {benchmark} · {model}"
            sections.append(Section(title, [*blocks, made(panel.get("made") or about)], level=3))
    return sections


def chosen_metrics(cell: Mapping[str, Any]) -> list[Metric]:
    """The metrics of a cell that have a direction, sub-settings left out."""
    return [
        Metric.from_record(name, record)
        for name, record in cell["metrics"].items()
        if "/" not in name and record["better"] is not None
    ]


def triple(cell: Mapping[str, Any], metric: Metric) -> tuple[float, float, float]:
    """(value, low, high) on the scale that is printed; NaN where undefined."""
    found = cell["metrics"][metric.name]
    return tuple(math.nan if found[k] is None else found[k] * metric.show for k in ("value", "low", "high"))  # type: ignore[return-value]


def _panel(panel: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]], name: str) -> list[Block]:
    rows = panel["rows"]
    metrics = chosen_metrics(cells[rows[0]["method"]])
    places = {m.name: ranked([cells[row["method"]] for row in rows], m) for m in metrics}
    lines: list[list[Cell | str]] = []
    for place, row in enumerate(rows):
        line: list[Cell | str] = [Cell(text) for text in row["cells"]]
        for metric in metrics:
            value, low, high = triple(cells[row["method"]], metric)
            bounds = "" if math.isnan(low) else f"[{low:.{metric.decimals}f}, {high:.{metric.decimals}f}]"
            line.append(Cell(number(value, metric.decimals), places[metric.name][place], bounds))
        lines.append(line)
    greedy = cells.get("greedy")
    if greedy is not None:
        values = [number(triple(greedy, m)[0], m.decimals) for m in metrics]
        lines.append(["greedy", *[""] * (len(panel["columns"]) - 1), *values])
    items = cells[rows[0]["method"]]["answers"]
    main = [" ".join(row["cells"]) for row in rows if row["main"]]
    table = Table(
        (*panel["columns"], *(heading(m) for m in metrics)),
        rows_of(lines),
        f"Best in bold, second underlined, 95 % intervals in brackets; {items} items."
        + (f" Main configuration: {main[0]}." if main else ""),
        marked=frozenset(place for place, row in enumerate(rows) if row["main"]),
        left=len(panel["columns"]),
    )
    return [table, _panel_figure(panel, cells, metrics, name, greedy)]


def _panel_figure(
    panel: Mapping[str, Any],
    cells: Mapping[str, Mapping[str, Any]],
    metrics: Sequence[Metric],
    name: str,
    greedy: Mapping[str, Any] | None,
) -> Block:
    drawn = [m for m in metrics if m.name in ("CHAIRi", "F1", "accuracy", "macro", "token_max", "qAcc")][:3] or list(
        metrics
    )[:3]
    heads = [(m.name, heading(m)) for m in drawn]
    values = {row["method"]: {m.name: triple(cells[row["method"]], m) for m in drawn} for row in panel["rows"]}
    baseline = {} if greedy is None else {m.name: triple(greedy, m)[0] for m in drawn}
    if "alpha" in panel["settings"] and len(panel["rows"]) > 3:
        at = panel["settings"].index("alpha")
        lines: dict[str, list[tuple[float, dict[str, tuple[float, float, float]]]]] = {}
        for row in panel["rows"]:
            others = [text for place, text in enumerate(row["cells"]) if place != at]
            lines.setdefault(", ".join(others) or "ReVisiT", []).append(
                (float(row["values"][at]), values[row["method"]])
            )
        return figures.sweep(name, panel["title"], heads, lines, baseline, "α")
    named = [(" · ".join(filter(None, row["cells"])), values[row["method"]]) for row in panel["rows"]]
    return figures.bars(name, panel["title"], heads, named, baseline)


def ranked(cells: Sequence[Mapping[str, Any]], metric: Metric) -> list[int]:
    """The rank of each cell by its printed value."""
    values = (cell["metrics"][metric.name]["value"] for cell in cells)
    return ranks([math.nan if value is None else value for value in values], metric)


def _published_panel(panel: Mapping[str, Any]) -> Table:
    from revisit.paper.ablation import shown

    paper = published.table("ablation")
    rows = paper["panels"][panel["key"]]
    return Table(
        (*panel["columns"], "CHAIRs ↓", "CHAIRi ↓", "F1 ↑"),
        rows_of(
            [
                (
                    *(shown(row[name]) for name in panel["settings"]),
                    *(number(row[m], d) for m, d in (("CHAIRs", 1), ("CHAIRi", 2), ("F1", 2))),
                )
                for row in rows
            ]
        ),
        f"{paper['model']}, CHAIR, 500 pictures.",
        published=True,
        left=len(panel["columns"]),
    )
