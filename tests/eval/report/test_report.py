"""The report has the measured numbers and their commands, and its page is self-contained."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_grid import HashEngine, Letters, Shift, make_config, write_items

from revisit import ReVisiT, RevisitError
from revisit.cli import analyze
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks.base import Scores
from revisit.eval.log import Log, Request, read_logs
from revisit.eval.report.document import Cell, Document, Figure, Section, Table, Text, to_html, to_markdown, write
from revisit.eval.run import Reporter, run
from revisit.eval.spec import Spec, environment
from revisit.io.files import make_folder, write_json
from revisit.paper import report
from revisit.paper.ablation import ablation_sections
from revisit.paper.objects import recalls
from revisit.paper.report import all_results, build, find_runs


def panel(*labels: str) -> dict[str, Any]:
    """A panel of an ablation, whose first method is the main configuration."""
    made = {"command": "revisit ablate a", "settings": {"limit": 5}}
    rows = {method: [method] for method in labels}
    return {"key": "a", "title": "Shifts", "columns": ["by"], "main": labels[0], "rows": rows, **made}


def layer(number: int, norm: bool, hits: list[int]) -> dict[str, Any]:
    ks = [1, 5, 10, 30]
    return {
        "layer": number,
        "norm": norm,
        "full": recalls(hits, 200, ks),
        "objects": recalls([2 * h for h in hits], 200, ks),
    }


STUDIES: dict[str, dict[str, Any]] = {
    "hallucinated-steps": {
        "captions": 50,
        "hallucinated_captions": 20,
        "selection": {
            "mentions": 90,
            "hallucinated": 30,
            "kept": 25,
            "word of several tokens": 3,
            "no ground-truth word": 2,
        },
        "vocabulary": {"full": 2048, "words": 80, "categories": 66},
        "greedy_agreement": 1.0,
        "recall": recalls([1, 10, 20], 25, [1, 50, 100]),
        "steps": [],
    },
    "gt-vs-hal": {
        "captions": 50,
        "hallucinated_captions": 20,
        "vocabulary": {"words": 80, "categories": 66},
        "rows": [
            {
                "setting": name,
                "n": n,
                "gt_with": 24.49,
                "hal_with": 20.0,
                "gt_without": 21.0,
                "hal_without": 22.5,
                **{q: {"median": 1.5, "p": 0.01, "p_holm": p} for q in ("with_image", "without_image", "delta")},
            }
            for name, n, p in (("All tokens", 900, 0.0), ("Hallucinated steps", 25, 0.0321))
        ],
    },
    "projection": {
        "images": 5,
        "tokens": 200,
        "vocabulary": {"full": 2048, "words": 80, "categories": 66},
        "chance": [{"k": k, "recall": k / 100} for k in (1, 5, 10, 30)],
        "final_layer": 1,
        "layers": [layer(n, norm, [4 + n, 10, 20, 40]) for n in (0, 1) for norm in (False, True)],
    },
    "case-study": {
        "images": 5,
        "steps": 100,
        "changes": {"absent → shown": 3, "other → other": 1},
        "cases": [
            {
                "image": "7",
                "so_far": "There is a",
                "step": 3,
                "change": "absent → shown",
                "ground_truth": ["cat"],
                "layer": 5,
                "vision_token": 17,
                "plausible_tokens": 2,
                "rows": [{"token": "<cat>", "base": [-1.0, 36.8], "vision": [-0.1, 90.5], "final": [-1.1, 95.0]}],
            }
        ],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    data = write_items(root / "data", 30)
    methods = (Shift(by=0), Shift(by=1))
    run(make_config(root / "out" / "run", data, method=methods), engine_for=lambda m: HashEngine(m, pause=0.001))
    grid = root / "out" / "ablation"
    run(make_config(grid, data, model="m1", method=methods), engine_for=HashEngine)
    write_json(grid / "ablation.json", [panel("shift", "shift(by=1)")])
    about = {
        "written": "2026-11-18T00:00:00+00:00",
        "command": "revisit analyze",
        "settings": {"model": "m1", "data": "scenes"},
        "environment": environment(),
    }
    for name, result in STUDIES.items():
        write_json(make_folder(root / "out/studies") / f"{name}.json", {"study": name, **about, "result": result})
    return root / "out"


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def document(folder: Path) -> Document:
    return build(folder, resamples=99)


def test_every_part_is_there_with_its_command(document: Document, folder: Path) -> None:
    titles = [section.title for section in document.sections]
    assert titles[1] == "Main results"
    assert set(STUDIES) == set(report.STUDIES) == set(analyze.NAMES)
    studies = [f"{study.title} · m1 · scenes" for study in report.STUDIES.values()]
    assert {"letters · m1 · run", "Ablations", "Analyses", "Provenance", *studies} <= {*titles}
    text = to_markdown(document)
    for shown in (
        "40.0", "[23.4, 59.3]",  # 10 of 25 with its interval
        "**24.49**", "<u>", "<1e-300", "0.03", "absent → shown", "-1.10", "revisit ablate a",
    ):  # fmt: skip
        assert shown in text, shown
    for log in read_logs(folder / "run"):
        assert log.scores is not None
        assert f"{log.scores.value('vowels')[0]:.1f}" in text


def test_it_opens_with_a_verdict_per_benchmark(document: Document, folder: Path) -> None:
    sentences = [block.text for block in document.sections[0].blocks if isinstance(block, Text)]
    assert [text.split(":")[0] for text in sentences] == ["letters (m1, n = 30)", "letters (m2, n = 30)"]
    for text in sentences:
        assert re.search(r"shift\(by=1\) (improves|worsens|shows no significant difference in) .*p = ", text)
    (plot,) = (block for block in document.sections[0].blocks if isinstance(block, Figure))
    assert (plot.name, plot.alt) == ("differences", " ".join(sentences))
    assert document.title in ("No significant difference in vowels", "shift improves vowels", "shift worsens vowels")
    text = to_markdown(document)
    assert text.count("permutation test") == 1  # the notes on the statistics appear once
    assert f"revisit view {folder / 'run'}" in text


def test_a_stopped_run_comes_first(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    stopped = read_logs(tmp_path / "run")[-1]
    lines = stopped.path.read_bytes().splitlines(keepends=True)
    stopped.path.write_bytes(b"".join(lines[:21]))
    first = build(tmp_path, resamples=99).sections[0]
    assert first.title == "Incomplete"
    (notice,) = (block.text for block in first.blocks if isinstance(block, Text))
    assert notice.startswith("run: This run is incomplete: 1 of 4 combinations")
    assert "(m2 · shift(by=1) · letters: 20 of 30 answers)" in notice
    assert notice.endswith("To finish it, call `revisit.evaluate` again with the same arguments.")
    assert build(folder / "run", resamples=99).sections[0].title != "Incomplete"


def test_the_page_is_self_contained_and_well_formed(document: Document) -> None:
    text = to_html(document)
    page = Page(text)
    assert page.refers
    for target in page.refers:
        assert target.startswith("data:") or target[1:] in page.ids
    assert len(set(page.ids)) == len(page.ids)
    assert "http://" not in re.sub(r"data:[^\"]*", "", text)
    assert "https://" not in text
    assert "default-src 'none'" in text
    assert "&lt;cat&gt;" in text  # tokens are not markup


def test_figures_are_written(document: Document, tmp_path: Path) -> None:
    files = write(document, tmp_path)
    linked = re.findall(r"\]\((figures/[^)]+)\)", (tmp_path / "report.md").read_text())
    assert len(set(linked)) == len(linked) == 3  # the differences, two studies
    assert {*files} == {tmp_path / name for name in ("report.html", "report.md", *linked)}
    assert all(file.exists() for file in files)


def test_a_folder_without_a_finished_log_raises(tmp_path: Path) -> None:
    with pytest.raises(RevisitError, match="Nothing to report"):
        build(tmp_path)
    data = write_items(tmp_path / "data", 5)
    (log,) = run(make_config(tmp_path / "run", data, model="m1", method=Shift(by=0)), engine_for=HashEngine)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(RevisitError, match=r"no finished log.*shift · letters: 2 of 5 answers"):
        build(tmp_path)
    with pytest.raises(RevisitError, match="Nothing to report"):
        build(tmp_path / "absent")


def test_markdown_groups_and_escapes() -> None:
    table = Table(("a", "x", "y"), (("r|1", Cell("1", 1), Cell("2", 2, "[0, 3]")),), "Caption", groups=(("G", 2),))
    text = to_markdown(Document("T", "lead", [Section("S", [Text("words"), table])]))
    assert "| a | G: x | G: y |" in text
    assert "| r\\|1 | **1** | <u>2</u> [0, 3] |" in text


def test_an_ablation_does_not_hide_other_results_of_its_folder(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 12)
    methods = (Shift(by=0), Shift(by=1), Shift(by=2))
    run(make_config(tmp_path / "out", data, model="m1", method=methods), engine_for=HashEngine)
    write_json(tmp_path / "out/ablation.json", [panel("shift(by=1)")])
    text = to_markdown(build(tmp_path / "out", resamples=99))
    main = text[text.index("Main results") : text.index("Ablations")]
    assert "shift(by=2)" in main
    assert "shift(by=1)" not in main


def test_a_panel_has_no_logs_of_other_decoding_settings(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 12)
    for length, methods in ((3, (Shift(by=0), Shift(by=1))), (5, (Shift(by=0),))):
        run(make_config(tmp_path, data, model="m1", method=methods, max_new_tokens=length), engine_for=HashEngine)
    logs = read_logs(tmp_path)
    (section,) = ablation_sections([panel("shift", "shift(by=1)")], logs, "ablation")
    assert isinstance(section.blocks[0], Table)
    shown = [row[1].text for row in section.blocks[0].rows if isinstance(row[1], Cell)]
    expected = [f"{log.scores.value('vowels')[0]:.1f}" for log in logs if log.scores]
    assert shown == expected[:2]
    assert expected[2] != expected[0]
    assert "max_new_tokens 3" in section.title


def test_runs_side_by_side_and_a_changed_file_is_rejected(folder: Path, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        shutil.copytree(folder / "run", tmp_path / name)
    (section,) = all_results(find_runs(tmp_path))
    (table,) = section.blocks
    assert isinstance(table, Table)
    expected = itertools.product(("m1", "m2"), ("shift", "shift(by=1)"), ("ours", "theirs"))
    assert {tuple(row[:3]) for row in table.rows} == {*expected}
    values = [float(row[4].text) for row in table.rows if isinstance(row[4], Cell)]
    assert values == sorted(values)  # lower is better
    assert {row[5] for row in table.rows} == {"not run"}
    changed = read_logs(tmp_path / "theirs")[0].path
    lines = changed.read_text().splitlines(keepends=True)
    changed.write_text("".join([lines[0], lines[1].replace('"text":"', '"text":"a', 1), *lines[1:]]))
    (section,) = all_results(find_runs(tmp_path))
    rejected, table = section.blocks
    assert isinstance(rejected, Text)
    assert rejected.text == f"Rejected because of damaged lines (1): {changed}."
    assert isinstance(table, Table)
    assert len(table.rows) == 7


def made_log(control: str, dtype: str, value: float) -> Log:
    identity = {**HashEngine("m").identity(8, []), "dtype": dtype}
    spec = Spec.of(identity, Shift(), Letters(), Decoding(max_new_tokens=7), control=control)
    log = Log(Path(f"{control} {dtype}"), spec)
    log.requests.append(Request(time="", items=1, items_hash="", environment={}))
    shown = {"vowels": Letters.metrics[0]}
    log.scores = Scores({"vowels": value}, items={"q": ""}, intervals={"vowels": None}, shown=shown, headline="vowels")
    return log


def test_a_result_is_listed_with_its_own_control() -> None:
    controls = [made_log("no image", "bfloat16", 0.1), made_log("no image", "float32", 0.2)]
    runs = {"ours": [*controls, made_log("", "float32", 0.5)], "theirs": [made_log("", "float32", 0.6)]}
    (table,) = all_results(runs)[0].blocks
    assert isinstance(table, Table)
    assert [row[5] for row in table.rows] == ["20.0", "not run"]


def test_a_second_ablation_keeps_the_panels_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from revisit.paper import ablation

    monkeypatch.setattr(ablation, "run", lambda *_: [])
    config = make_config(tmp_path, tmp_path)
    panels = ablation.paper_panels(ReVisiT())
    for key, words in (("a", "first"), ("c", "second"), ("c", "third")):
        monkeypatch.setattr(sys, "argv", [words])
        ablation.ablate(config, {key: panels[key]}, ReVisiT(), Reporter())
    found = ablation.read_panels(tmp_path)
    assert [(made["key"], made["command"]) for made in found] == [("a", "first"), ("c", "third")]
