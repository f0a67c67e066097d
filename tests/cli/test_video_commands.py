"""`revisit generate` on videos, as a user types it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from command_line import Run
from PIL import Image

import families
from video_clips import UNEVEN, make_clip, number_in

needs_torchvision = pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="needs torchvision")


@needs_torchvision
def test_generate_lists_the_frames_and_the_rest_of_a_folder_goes_on(tmp_path: Path, run: Run) -> None:
    families.save("qwen3_vl", tmp_path / "model")
    clips = tmp_path / "clips"
    clips.mkdir()
    make_clip(clips / "even.mp4")
    make_clip(clips / "uneven.mkv", stamps=UNEVEN)
    (clips / "broken.mp4").write_bytes(b"not a video")
    families.image(3).save(clips / "photo.png")
    options = ("--model", str(tmp_path / "model"), "--max-new-tokens", "3", "--json")

    done = run("generate", str(clips), *options, "--frames", "8")
    lines = {Path(line["images"][0]).name: line for line in map(json.loads, done.out.splitlines())}
    assert done.status == 3
    assert "unsupported format" in lines["broken.mp4"]["error"]
    assert "frames" not in lines["photo.png"]
    assert [frame["index"] for frame in lines["even.mp4"]["frames"]] == [6, 18, 31, 43, 56, 68, 81, 93]
    assert lines["even.mp4"]["frames"][0] == {"index": 6, "time": 0.24}
    assert all(frame["time"] == UNEVEN[frame["index"]] / 1000 for frame in lines["uneven.mkv"]["frames"])

    page = tmp_path / "clip.html"
    done = run("generate", str(clips / "even.mp4"), *options, "--fps", "1", "--html", str(page))
    assert done.status == 0, done.err
    assert [frame["time"] for frame in json.loads(done.out)["frames"]] == [0.48, 1.48, 2.48, 3.48]
    found = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.S)
    assert found is not None
    assert [image["time"] for image in json.loads(found[1])["images"]] == [0.48, 1.48, 2.48, 3.48]


def test_a_model_for_images_and_wrong_files_give_one_sentence(tmp_path: Path, run: Run) -> None:
    clip = make_clip(tmp_path / "clip.mp4", frames=20)
    assert "reads images, not videos" in run("generate", clip, "--frames", "2").sentence
    assert "not both" in run("generate", clip, "--frames", "2", "--fps", "1").sentence
    assert "check the path" in run("generate", tmp_path / "none.mp4").sentence


@needs_torchvision
def test_check_lens_and_own_questions_about_a_clip(tmp_path: Path, run: Run) -> None:
    families.save("qwen3_vl", tmp_path / "model")
    clip = make_clip(tmp_path / "clip.mp4")
    model = ("--model", tmp_path / "model")

    checked = run("check", clip, "A red cat.", *model, "--frames", "2", "--words", "content", "--json")
    assert {word["time"] for word in json.loads(checked.out)["words"] if word["checkable"]} == {1.0}
    assert " s " in run("lens", clip, *model, "--frames", "2", "--words", "a,b").out

    (tmp_path / "texts.jsonl").write_text(json.dumps({"video": "clip.mp4", "text": "A red cat."}))
    several = ("--images", tmp_path, "--out", tmp_path / "checks", "--words", "content")
    assert run("check", tmp_path / "texts.jsonl", *several, *model).status in (0, 1)
    (stored,) = map(json.loads, (tmp_path / "checks" / "checks.jsonl").read_text("utf-8").splitlines())
    assert stored["words"][1]["time"] in (0.24, 1.24, 2.24, 3.24)
    assert "<figcaption>0.24 s</figcaption>" in (tmp_path / "checks" / "index.html").read_text("utf-8")

    (tmp_path / "own.jsonl").write_text(json.dumps({"video": "clip.mp4", "question": "Is it red?", "label": "no"}))
    out = tmp_path / "out"
    options = ("--method", "greedy", "--out", out, "--max-new-tokens", "2", "--quiet", "--report")
    assert run("eval", *model, "--benchmark", f"yesno:{tmp_path / 'own.jsonl'},frames=2", *options).status == 0
    (log,) = (out / "logs").glob("*.jsonl")
    (answer,) = (line for line in map(json.loads, log.read_text("utf-8").splitlines()) if "text" in line)
    assert answer["images"] == ["clip.mp4"]
    assert answer["frames"] == [{"index": 25, "time": 1.0}, {"index": 75, "time": 3.0}]

    assert (out / "report.html").is_file()
    found = re.search(r'id="data">(.*?)</script>', (out / "view" / "index.html").read_text("utf-8"), re.S)
    assert found is not None
    (sample,) = json.loads(found[1])["samples"]
    assert sample["s"] == [1.0, 3.0]
    assert [number_in(Image.open(out / "view" / name)) for name in sample["p"]] == [25, 75]
    assert "--frames 2" in sample["cmd"]
