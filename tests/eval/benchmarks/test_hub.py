"""Hub datasets with the real columns: what is written, read back and scored, and what raises an error."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Features, Image, Value
from huggingface_hub.errors import RepositoryNotFoundError
from PIL import Image as Pillow
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks.base import HubDataset
from revisit.eval.benchmarks.io import data
from revisit.eval.benchmarks.io.data import Draft
from revisit.io.files import new_folder
from revisit.io.records import Record

Row = dict[str, Any]


def image(shade: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Pillow.new("RGB", (4, 3), (shade, 2 * shade % 256, 7)).save(out, format=kind)
    return out.getvalue()


def column(shade: int, kind: str = "PNG") -> Row:
    return {"bytes": image(shade, kind), "path": None}


def hallusion(category: str, visual: str, figure: str, gold: str, name: str | None) -> Row:
    asked = {"set_id": "0", "figure_id": figure, "question_id": "0", "question": "Is it?", "gt_answer": gold}
    about = {"category": category, "subcategory": "chart", "visual_input": visual, "gt_answer_details": "because"}
    return {**about, **asked, "filename": name, "image": column(30) if name else None}


def mme(category: str, name: str, kind: str) -> list[Row]:
    about = {"question_id": f"{category}/{name}", "image": column(70, kind), "category": category}
    asked = (("Is there a dog?", "Yes"), ("Is there a cat?", "No"))
    return [{**about, "question": question, "answer": gold} for question, gold in asked]


def mmmu(id: str, question: str, options: str, answer: str, kind: str, shades: list[int]) -> Row:
    images = [column(shade) for shade in shades] + [None] * (7 - len(shades))
    about = {"id": id, "question": question, "options": options, "answer": answer, "question_type": kind}
    return {**about, **{f"image_{n}": value for n, value in enumerate(images, 1)}}


NATURAL = {"Image_0": column(30), "Image_1": column(40)}
ROWS: dict[str, list[Row]] = {
    "hallusionbench": [
        hallusion("VS", "1", "1", "1", "./VS/chart/0_1.png"),
        hallusion("VD", "1", "0", "1", "./VD/chart/0_0.png"),
        hallusion("VD", "2", "1", "0", "./VD/chart/0_1.png"),
        hallusion("VS", "0", "0", "0", None),
    ],
    "mmmu": [
        mmmu("validation_Art_1", "Which <image 1>?", "['red', 'blue']", "B", "multiple-choice", [61]),
        mmmu("validation_Math_2", "<image 1> and <image 2>?", "[]", "['3', 'three']", "open", [62, 63]),
    ],
    "mme": [*mme("existence", "0001.jpg", "JPEG"), *mme("OCR", "0002.png", "PNG")],
    "dash_b": [
        {"question_id": n, "question": "Can you see a dog?", "answer": said, "object": "dog", "image": column(int(n))}
        for n, said in (("7", "yes"), ("8", "no"), ("9", "no"))
    ],
    "naturalbench": [
        {**NATURAL, "Question_0": "A dog?", "Question_1": "A cat?", "Question_Type": "yes_no"},
        {**NATURAL, "Question_0": "Which?", "Question_1": "Where?", "Question_Type": "multiple_choice"},
    ],
}
# Answers in the order of the items, and metrics that follow from them by hand.
KNOWN: dict[str, tuple[list[str], dict[str, float]]] = {
    # VS with figure right, VD original wrong, VD edited right, VS without figure right
    "hallusionbench": (["Yes", "No", "No", "No"], {"aAcc": 75, "VD/aAcc": 50, "VS/aAcc": 100, "VS/qAcc": 100}),
    "mmmu": (["(A)", "it is three"], {"micro": 1 / 2, "Art/accuracy": 0, "Math/accuracy": 1}),
    "mme": (["Yes", "No", "Yes", "Yes"], {"acc": 75, "acc_plus": 50, "existence/score": 200, "OCR/score": 50}),
    "dash_b": (["Yes.", "Yes.", "No."], {"accuracy": 2 / 3, "TPR": 1, "TNR": 1 / 2, "harmonic": 2 / 3}),
    # the first group right but for its second question on the first image
    "naturalbench": (
        ["Yes", "No", "Yes", "Yes", "A", "B", "B", "A."],
        {"Q_Acc": 3 / 4, "I_Acc": 3 / 4, "G_Acc": 1 / 2, "Acc": 7 / 8},
    ),
}


def write(name: str, rows: list[Row], folder: Path) -> None:
    """Write rows as a benchmark's files."""
    get(name).write_rows((Record(row, f"row {n}") for n, row in enumerate(rows, 1)), Draft(folder, folder))


@pytest.mark.parametrize("name", ROWS)
def test_written_loaded_and_scored(name: str, tmp_path: Path) -> None:
    write(name, ROWS[name], tmp_path)
    bench = get(name)
    items = bench.load(tmp_path)
    texts, expected = KNOWN[name]
    assert bench.files(tmp_path)
    for path in {path for item in items for path in item.images}:
        with Pillow.open(path) as found:
            assert found.size == (4, 3)
    scores = bench.score(items, {item.id: text for item, text in zip(items, texts, strict=True)})
    assert {metric: scores.metrics[metric] for metric in expected} == pytest.approx(expected)


def test_files_are_the_official_ones(tmp_path: Path) -> None:
    write("hallusionbench", ROWS["hallusionbench"], tmp_path)
    rows = json.loads((tmp_path / "hallusionbench/HallusionBench.json").read_text())
    assert [row["filename"] for row in rows] == ["VS/chart/0_1.png", "VD/chart/0_0.png", "VD/chart/0_1.png", None]
    assert (tmp_path / "hallusionbench/VD/chart/0_1.png").read_bytes() == image(30)  # not compressed again
    assert len(get("hallusionbench", part="VD").load(tmp_path)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"category": "hard"}, "row 2: 'category' must be one of"),
        ({"answer": "maybe"}, "row 2: 'answer' must be one of yes, no, not 'maybe'"),
        ({"image": None}, "row 2 has no image"),
        ({"image": {"bytes": b"text"}}, "row 2: its image is in none of the formats"),
        (None, "raise --limit"),
    ],
)
def test_rows_that_do_not_fit(changes: Row | None, message: str, tmp_path: Path) -> None:
    first, second = ROWS["mme"][:2]
    with pytest.raises(RevisitError, match=message):
        write("mme", [first] if changes is None else [first, {**second, **changes}], tmp_path)


def test_rows_may_name_images_of_their_dataset_only(tmp_path: Path) -> None:
    source = tmp_path / "dataset"
    source.mkdir()
    (source / "a.png").write_bytes(image(10))
    (tmp_path / "secret.png").write_bytes(image(20))
    out = Draft(tmp_path / "out", source)
    assert out.image("a", {"bytes": None, "path": "a.png"}, "row 1") == "a.png"
    for path in (str(tmp_path / "secret.png"), "../secret.png", "/dev/zero", "http://127.0.0.1:1/a.png", "none.png"):
        with pytest.raises((RevisitError, FileNotFoundError)):
            out.image(path, {"bytes": None, "path": path}, "row 2")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.png"]


# -- datasets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """MMMU as the Hub has it: parquet files that declare images, and a card with one configuration per subject."""
    texts = ("id", "question", "options", "answer", "question_type")
    features = {**dict.fromkeys(texts, Value("string")), **{f"image_{n}": Image() for n in range(1, 8)}}
    folder, lines = tmp_path / "dataset", ["---", "configs:"]
    for row, subject in zip(ROWS["mmmu"][::-1], ("Math", "Art"), strict=True):  # not in official order
        file = folder / subject / "validation-00000-of-00001.parquet"
        file.parent.mkdir(parents=True)
        datasets.Dataset.from_dict({k: [row[k]] for k in features}, features=Features(features)).to_parquet(file)
        path = f"    path: {subject}/validation-*"
        lines += [f"- config_name: {subject}", "  data_files:", "  - split: validation", path]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def test_a_dataset_in_official_order_fetched_once(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    words = ["data", "get", "mmmu", str(folder), "--from", str(dataset)]
    printed = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert f"revisit eval --benchmark mmmu --data mmmu={folder}" in printed.replace("\n", "")
    items = get("mmmu").load(folder)
    assert [item.id for item in items] == ["validation_Art_1", "validation_Math_2"]
    assert [path.name for path in items[1].images] == ["validation_Math_2_1.png", "validation_Math_2_2.png"]
    assert [path.read_bytes() for path in items[1].images] == [image(62), image(63)]
    about = json.loads((folder / "source.json").read_text())
    assert (about["source"], about["revision"], about["items"], about["images"]) == (str(dataset), None, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "dataset"]  # no draft is left
    assert [item.id for item in get("mmmu", keep="single-image").load(folder)] == ["validation_Art_1"]
    assert data.get("mmmu", folder, str(dataset)) == about
    with pytest.raises(RevisitError, match="has other files"):
        data.get("mmmu", folder, str(dataset), limit=1)


def test_a_limit_reads_no_further(dataset: Path, tmp_path: Path) -> None:
    (dataset / "Math/validation-00000-of-00001.parquet").write_bytes(b"not there yet")
    assert data.get("mmmu", tmp_path / "some", str(dataset), limit=1)["items"] == 1
    with pytest.raises(RevisitError, match="could not be read as MMMU's dataset"):
        data.get("mmmu", tmp_path / "all", str(dataset))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dataset", "some"]


def test_unknown_names_raise(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for name, source, message in (
        ("mmee", None, "Did you mean 'mme'"),
        ("mme", str(tmp_path / "empty"), "could not be read as MME's dataset"),
        ("mme", str(dataset), "could not be read as MME's dataset"),  # other columns
    ):
        with pytest.raises(RevisitError, match=message):
            data.get(name, tmp_path / "data", source)
    monkeypatch.setattr("revisit.errors.find_spec", lambda name: None)
    with pytest.raises(RevisitError, match=r"pip install 'datasets"):
        data.get("mme", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_moved_and_unreachable_repositories(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that moved is found by its second name; one that cannot be reached raises one sentence."""
    revision = dataset.rename(tmp_path / "c0ffee")
    monkeypatch.setattr(type(get("mmmu")), "hub", HubDataset(("old/MMMU", "new/MMMU"), ("validation",), ("Art",)))

    def download(repo: str, **_: Any) -> str:
        if repo == "new/MMMU":
            return str(revision)
        if repo == "old/MMMU":
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        raise ConnectionError("no route to host.\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    about = data.get("mmmu", tmp_path / "data")
    assert (about["source"], about["revision"], about["rows"]) == ("new/MMMU", "c0ffee", 1)
    with pytest.raises(RevisitError, match="The Hub has no dataset old/MMMU"):
        data.get("mmmu", tmp_path / "other", "old/MMMU")
    with pytest.raises(RevisitError, match=r"ConnectionError: no route to host\).*hf download my/MMMU .*--local-dir"):
        data.get("mmmu", tmp_path / "other", "my/MMMU")
    assert not (tmp_path / "other").exists()


def test_killed_in_the_middle(dataset: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from revisit.eval.benchmarks.io import data\n"
        "stop = lambda done: os.kill(os.getpid(), signal.SIGKILL)\n"
        "data.get('mmmu', Path(sys.argv[1]), sys.argv[2], progress=stop)\n"
    )
    folder, left = tmp_path / "data", tmp_path / ".data.draft"
    ended = subprocess.run([sys.executable, "-c", script, folder, dataset], env=dict(os.environ), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert (left / "mmmu/images/validation_Art_1_1.png").exists()  # it was in the middle
    (left / "mmmu/stray.jpg").write_bytes(b"of another attempt")
    assert data.get("mmmu", folder, str(dataset))["items"] == 2
    assert not left.exists()
    assert not (folder / "mmmu/stray.jpg").exists()


def test_two_processes_do_not_fill_one_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "data") as root:
        (root / "a.txt").write_text("one")
        with pytest.raises(RevisitError, match=r"Another process is writing .*data"), new_folder(tmp_path / "data"):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["data"]  # neither the draft nor a lock file
