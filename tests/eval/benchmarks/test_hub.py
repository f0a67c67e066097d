"""Hub datasets, here small parquet folders with the real columns: what is written, read back and scored, and what raises an error."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from datasets import Features, Image, Value
from PIL import Image as Pillow
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks.io import data, drafts, hub
from revisit.explain.files import new_folder

TEXT, NUMBER = Value("string"), Value("int64")


def image(shade: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Pillow.new("RGB", (4, 3), (shade, 2 * shade % 256, 7)).save(out, format=kind)
    return out.getvalue()


def size(path: Path) -> tuple[int, int]:
    with Pillow.open(path) as image:
        return image.size


def column(data: bytes | None) -> dict[str, Any] | None:
    return None if data is None else {"bytes": data, "path": None}


def save(file: Path, features: dict[str, Any], rows: list[tuple[Any, ...]]) -> None:
    """Write a parquet file whose schema declares images, like the Hub's files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {name: [row[n] for row in rows] for n, name in enumerate(features)}
    datasets.Dataset.from_dict(values, features=Features(features)).to_parquet(file)


def card(folder: Path, **configs: dict[str, str]) -> Path:
    """Write a dataset card that assigns files to configurations and splits."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [line for s, path in splits.items() for line in (f"  - split: {s}", f"    path: {path}")]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


HALLUSION = {
    **dict.fromkeys(("category", "subcategory", "visual_input", "set_id", "figure_id", "sample_note"), TEXT),
    **dict.fromkeys(("question_id", "question", "gt_answer_details", "gt_answer", "filename"), TEXT),
    "image": Image(),
}
FIGURE = image(30)


def make_hallusionbench(folder: Path) -> Path:
    def row(category: str, visual: str, figure: str, question: str, gold: str, name: str | None) -> tuple[Any, ...]:
        data = column(FIGURE) if name else None
        return (category, "chart", visual, "0", figure, "n", question, f"Q{question}?", "because", gold, name, data)

    with_figure = [
        row("VS", "1", "1", "0", "1", "./VS/chart/0_1.png"),
        row("VD", "1", "0", "0", "1", "./VD/chart/0_0.png"),
        row("VD", "2", "1", "0", "0", "./VD/chart/0_1.png"),
    ]
    save(folder / "data/image-00000-of-00001.parquet", HALLUSION, with_figure)
    save(folder / "data/non_image-00000-of-00001.parquet", HALLUSION, [row("VS", "0", "0", "0", "0", None)])
    return card(folder, default={"image": "data/image-*", "non_image": "data/non_image-*"})


MMMU = {
    **dict.fromkeys(("id", "question", "options", "explanation"), TEXT),
    **{f"image_{n}": Image() for n in range(1, 8)},
    **dict.fromkeys(("img_type", "answer", "topic_difficulty", "question_type", "subfield"), TEXT),
}


def mmmu_row(item: str, question: str, options: str, answer: str, kind: str, shades: list[int]) -> tuple[Any, ...]:
    images = [column(image(shade)) for shade in shades] + [None] * (7 - len(shades))
    return (item, question, options, "", *images, "['Plots']", answer, "Easy", kind, "x")


def make_mmmu(folder: Path) -> Path:
    choice = mmmu_row("validation_Art_1", "Which <image 1>?", "['red', 'blue']", "B", "multiple-choice", [61])
    opened = mmmu_row("validation_Math_2", "<image 1> and <image 2>?", "[]", "['3', 'three']", "open", [62, 63])
    save(folder / "Art/validation-00000-of-00001.parquet", MMMU, [choice])
    save(folder / "Math/validation-00000-of-00001.parquet", MMMU, [opened])
    return card(
        folder,
        Math={"validation": "Math/validation-*"},  # not in official order
        Art={"validation": "Art/validation-*"},
    )


MME = {"question_id": TEXT, "image": Image(), "question": TEXT, "answer": TEXT, "category": TEXT}


def make_mme(folder: Path) -> Path:
    rows = []
    for category, name, kind in (("existence", "0001.jpg", "JPEG"), ("OCR", "0002.png", "PNG")):
        for asked, gold in (("Is there a dog? Please answer yes or no.", "Yes"), ("Is there a cat?", "No")):
            rows.append((f"{category}/{name}", column(image(70, kind)), asked, gold, category))
    save(folder / "data/test-00000-of-00001.parquet", MME, rows)
    return card(folder, default={"test": "data/test-*"})


LLAVA = {
    "question_id": Value("int8"),
    "question": TEXT,
    "image": Image(),
    **dict.fromkeys(("caption", "gpt_answer", "category", "image_id"), TEXT),
}


def make_llava_bench(folder: Path) -> Path:
    data = column(image(80, "JPEG"))
    rows = [
        (0, "What is it?", data, "A hill.", "It is a hill.", "conv", "001"),
        (1, "Describe it.", data, "A hill.", "A green hill.", "detail", "001"),
    ]
    save(folder / "data/train-00000-of-00001.parquet", LLAVA, rows)
    return card(folder, default={"train": "data/train-*"})


def make_dash_b(folder: Path) -> Path:
    features = {**dict.fromkeys(("question_id", "question", "answer", "object", "img_id"), TEXT), "image": Image()}
    asked = [("7", "yes"), ("8", "no"), ("9", "no")]
    rows = [(n, "Can you see a dog?", said, "dog", f"{n}.png", column(image(int(n)))) for n, said in asked]
    save(folder / "data/test-00000-of-00001.parquet", features, rows)
    return card(folder, default={"test": "data/test-*"})


def make_naturalbench(folder: Path) -> Path:
    features = {
        **dict.fromkeys(("Question_0", "Question_1"), TEXT),
        **dict.fromkeys(("Image_0", "Image_1"), Image()),
        **dict.fromkeys([f"Image_{i}_Question_{q}" for i in (0, 1) for q in (0, 1)], TEXT),
        "Question_Type": TEXT,
    }
    data = [column(image(n)) for n in (30, 40)]
    rows = [
        ("A dog?", "A cat?", *data, "Yes", "No", "No", "Yes", "yes_no"),
        (
            "Which? Option: A: one; B: two;",
            "Where? Option: A: in; B: out;",
            *data,
            "A",
            "B",
            "B",
            "A",
            "multiple_choice",
        ),
    ]
    save(folder / "data/train-00000-of-00001.parquet", features, rows)
    return card(folder, default={"train": "data/train-*"})


Maker = Callable[[Path], Path]
MAKERS: dict[str, Maker] = {
    "hallusionbench": make_hallusionbench,
    "mmmu": make_mmmu,
    "mme": make_mme,
    "llava_bench": make_llava_bench,
    "dash_b": make_dash_b,
    "naturalbench": make_naturalbench,
}
# Answers in the order of the items, and metrics that follow from them by hand.
KNOWN: dict[str, tuple[list[str], dict[str, float]]] = {
    # VS with figure right, VD original wrong, VD edited right, VS without figure right
    "hallusionbench": (["Yes", "No", "No", "No"], {"aAcc": 75, "VD/aAcc": 50, "VS/aAcc": 100, "VS/qAcc": 100}),
    "mmmu": (["(A)", "it is three"], {"micro": 1 / 2, "Art/accuracy": 0, "Math/accuracy": 1}),
    "mme": (["Yes", "No", "Yes", "Yes"], {"acc": 75, "acc_plus": 50, "existence/score": 200, "OCR/score": 50}),
    "llava_bench": (["A high green hill.", "Green"], {"words": 2.5}),
    "dash_b": (["Yes.", "Yes.", "No."], {"accuracy": 2 / 3, "TPR": 1, "TNR": 1 / 2, "harmonic": 2 / 3}),
    # the first group right but for its second question on the first image
    "naturalbench": (
        ["Yes", "No", "Yes", "Yes", "A", "B", "B", "A."],
        {"Q_Acc": 3 / 4, "I_Acc": 3 / 4, "G_Acc": 1 / 2, "Acc": 7 / 8},
    ),
}


def revisit(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        folder = tmp_path / f"dataset-{name}"
        folder.mkdir()
        return MAKERS[name](folder)

    return make


@pytest.mark.parametrize("name", MAKERS)
def test_fetched_loaded_and_scored(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    source, folder = made(name), tmp_path / "data"
    printed = revisit("data", "get", name, folder, "--from", source)
    assert f"revisit eval --benchmark {name} --data {name}={folder}" in printed.replace("\n", "")
    bench = get(name)
    items = bench.load(folder)
    texts, expected = KNOWN[name]
    assert bench.files(folder)
    assert {size(image) for item in items for image in item.images} == {(4, 3)}
    scores = bench.score(items, {item.id: text for item, text in zip(items, texts, strict=True)})
    assert {metric: scores.metrics[metric] for metric in expected} == pytest.approx(expected)
    about = json.loads((folder / "source.json").read_text())
    assert (about["benchmark"], about["source"], about["revision"]) == (name, str(source), None)
    assert about["items"] == len(items)
    assert about["images"] == len({image for item in items for image in item.images})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", source.name]  # no draft is left


def test_files_are_the_official_ones(made: Callable[[str], Path], tmp_path: Path) -> None:
    data.get("hallusionbench", tmp_path / "hallusion", str(made("hallusionbench")))
    rows = json.loads((tmp_path / "hallusion/hallusionbench/HallusionBench.json").read_text())
    assert [row["filename"] for row in rows] == ["VS/chart/0_1.png", "VD/chart/0_0.png", "VD/chart/0_1.png", None]
    # byte for byte, so nothing is lost to a second compression
    assert (tmp_path / "hallusion/hallusionbench/VD/chart/0_1.png").read_bytes() == FIGURE
    data.get("llava_bench", tmp_path / "llava", str(made("llava_bench")))
    first = get("llava_bench").load(tmp_path / "llava")[0]
    assert (first.meta["context"], first.meta["reference"]) == ("A hill.", "It is a hill.")
    assert first.images[0].name == "001.jpg"


def test_mmmu_takes_subjects_in_official_order(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = made("mmmu")
    data.get("mmmu", tmp_path / "data", str(source))
    items = get("mmmu").load(tmp_path / "data")
    assert [item.id for item in items] == ["validation_Art_1", "validation_Math_2"]
    assert [image.name for image in items[1].images] == ["validation_Math_2_1.png", "validation_Math_2_2.png"]
    assert [image.read_bytes() for image in items[1].images] == [image(62), image(63)]
    assert data.get("mmmu", tmp_path / "one", str(source), limit=1)["items"] == 1


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    """A folder from the Hub has the images of all items that it lists."""
    source = make_mme(tmp_path / "dataset")
    (source / "data/test-00001-of-00002.parquet").write_bytes(b"not there yet")
    about = data.get("mme", tmp_path / "some", str(source), limit=2)
    assert (about["rows"], about["images"], about["asked"]["limit"]) == (2, 1, 2)
    assert data.fetched_items(tmp_path / "some") is None
    with pytest.raises(RevisitError, match="could not be read as MME's dataset"):
        data.get("mme", tmp_path / "all", str(source))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dataset", "some"]


def test_mme_keeps_only_whole_pairs(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = str(made("mme"))
    about = data.get("mme", tmp_path / "three", source, limit=3)
    assert (about["rows"], about["items"], about["images"]) == (3, 2, 1)
    with pytest.raises(RevisitError, match="raise --limit"):
        data.get("mme", tmp_path / "one", source, limit=1)


# ------------------------------------------------------------------------------------------------ wrong requests


def test_unknown_names_raise(made: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, source, message in (
        ("mmee", None, "Did you mean 'mme'"),
        ("mme", str(tmp_path / "nowhere"), "neither a folder nor a Hub dataset OWNER/NAME"),
        ("mme", str(tmp_path / "empty"), "could not be read as MME's dataset"),
        ("mme", str(made("mmmu")), "could not be read as MME's dataset"),  # other columns
        ("chair", "somebody/chair", "give the address of a copy of its servers"),
        ("mme", "http://127.0.0.1:9", "give OWNER/NAME on the Hub, or a folder"),
    ):
        with pytest.raises(RevisitError, match=message):
            data.get(name, tmp_path / "data", source)
    assert not (tmp_path / "data").exists()


GOOD = ("existence/0001.jpg", column(image(70)), "Is there a dog?", "Yes", "existence")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, (*GOOD[:4], "hard")], "row 2: 'category' must be one of"),
        ([(*GOOD[:3], "maybe", GOOD[4])], "row 1: 'answer' must be one of yes, no, not 'maybe'"),
        ([GOOD, (GOOD[0], None, *GOOD[2:])], "row 2 has no image"),
        ([GOOD, (GOOD[0], column(b"text"), *GOOD[2:])], "row 2: its image is in none of the formats"),
        ([], "has no rows"),
    ],
)
def test_rows_that_do_not_fit(rows: list[tuple[Any, ...]], message: str, tmp_path: Path) -> None:
    save(tmp_path / "dataset/data/test-00000-of-00001.parquet", MME, rows)
    card(tmp_path / "dataset", default={"test": "data/test-*"})
    with pytest.raises(RevisitError, match=message):
        data.get("mme", tmp_path / "data", str(tmp_path / "dataset"))
    assert [p.name for p in tmp_path.iterdir()] == ["dataset"]


def test_a_folder_of_another_origin(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = str(made("mme")), tmp_path / "data"
    folder.mkdir()  # empty is as good as new
    about = data.get("mme", folder, source)
    monkeypatch.setattr(hub, "write", lambda *_: pytest.fail("the same request must not fetch again"))
    assert data.get("mme", folder, source) == about
    for name, limit in (("mme", 2), ("mmmu", None)):
        with pytest.raises(RevisitError, match="contains mme from"):
            data.get(name, folder, source, limit=limit)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    for place, message in (("mine", "not empty"), ("mine/notes.txt", "is a file")):
        with pytest.raises(RevisitError, match=message):
            data.get("mme", tmp_path / place, source)
    assert (tmp_path / "mine/notes.txt").read_text() == "keep"


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("revisit.errors.find_spec", lambda name: None)
    with pytest.raises(RevisitError, match=r"pip install 'revisit-decoding\[hub\]'"):
        data.get("mme", tmp_path / "data")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host.\nlong story")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(RevisitError) as caught:
        data.get("mme", tmp_path / "data")
    text = str(caught.value)
    assert "lmms-lab/MME cannot be reached (ConnectionError: no route to host)" in text
    assert "hf download lmms-lab/MME --repo-type dataset --local-dir FOLDER" in text
    assert "long story" not in text
    assert not list(tmp_path.iterdir())


def test_a_hub_repository_is_pinned_and_streamed(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first owner is gone, the second has the dataset; what is loaded is the revision that was looked up."""
    from types import SimpleNamespace

    from huggingface_hub.errors import RepositoryNotFoundError

    asked: list[Any] = []

    def look(_: Any, repo: str, **__: Any) -> Any:
        asked.append(repo)
        if repo.startswith("lmms-lab/"):
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        return SimpleNamespace(sha="c0ffee")

    real, folder = datasets.load_dataset, str(made("mme"))

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        asked.append((path, name, options))
        return real(folder, name, streaming=options["streaming"])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", look)
    monkeypatch.setattr(datasets, "load_dataset", load)
    about = data.get("mme", tmp_path / "data", limit=4)
    assert (about["source"], about["revision"], about["rows"]) == ("lmms-lab-encoder/MME", "c0ffee", 4)
    assert asked == [
        "lmms-lab/MME",
        "lmms-lab-encoder/MME",
        ("lmms-lab-encoder/MME", None, {"streaming": True, "revision": "c0ffee"}),
    ]
    with pytest.raises(RevisitError, match="The Hub has no dataset lmms-lab/Nothing"):
        data.get("mme", tmp_path / "other", "lmms-lab/Nothing")


# ---------------------------------------------------------------------------------------------- whole or nothing


def test_a_full_disk_raises(made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    source = str(made("mme"))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RevisitError, match=r"No space left on device\); nothing was written"):
        data.get("mme", tmp_path / "data", source)
    assert [p.name for p in tmp_path.iterdir()] == ["dataset-mme"]


def test_killed_in_the_middle(made: Callable[[str], Path], tmp_path: Path) -> None:
    source = str(made("mme"))
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from revisit.eval.benchmarks.io import data\n"
        "def stop(done):\n"
        "    if done == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "data.get('mme', Path(sys.argv[1]), sys.argv[2], progress=stop)\n"
    )
    folder = tmp_path / "data"
    ended = subprocess.run([sys.executable, "-c", script, folder, source], env=dict(os.environ), check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not folder.exists()
    left = tmp_path / ".data.draft"
    assert (left / "mme/existence/0001.jpg").exists()  # it was in the middle
    (left / "mme/stray.jpg").write_bytes(b"of another attempt")
    assert data.get("mme", folder, source)["items"] == 4
    assert not left.exists()
    assert not (folder / "mme/stray.jpg").exists()


def test_a_killed_process_leaves_no_lock_that_blocks(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from revisit.explain.files import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as root:\n"
        "    (root / 'a.txt').write_text('one')\n"
        "    print('writing', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    folder = tmp_path / "data"
    with subprocess.Popen(
        [sys.executable, "-c", script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writing\n"
        with pytest.raises(RevisitError, match=r"Another process is writing .*data"), new_folder(folder):
            pass
        other.kill()
    assert not folder.exists()
    with new_folder(folder) as root:
        (root / "a.txt").write_text("two")
    assert (folder / "a.txt").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["data"]  # neither the draft nor a lock file


def test_rows_may_name_images_of_their_dataset_only(tmp_path: Path) -> None:
    source = tmp_path / "dataset"
    source.mkdir()
    (source / "a.png").write_bytes(image(10))
    (tmp_path / "secret.png").write_bytes(image(20))
    out = drafts.Draft(tmp_path / "out", source)
    assert out.image("a", {"bytes": None, "path": "a.png"}, "row 1") == "a.png"
    assert out.image("b", {"bytes": None, "path": str(source / "a.png")}, "row 2") == "b.png"
    for path in (str(tmp_path / "secret.png"), "../secret.png", "/dev/zero", "http://127.0.0.1:1/a.png", "none.png"):
        with pytest.raises((RevisitError, FileNotFoundError)):
            out.image(path, {"bytes": None, "path": path}, "row 3")
    with pytest.raises(RevisitError, match="row 4"):
        drafts.Draft(tmp_path / "out").image("c", {"bytes": None, "path": "hf://datasets/a/b/c.png"}, "row 4")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["a.png", "b.png"]
