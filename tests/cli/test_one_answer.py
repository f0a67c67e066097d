"""Every way from an image to an answer gives the same text, thought and tokens, and has the same limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import Run

import families
import revisit
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.local import LocalEngine
from revisit.explain import calibration
from revisit.io.images import open_image
from revisit.methods.greedy import Greedy
from revisit.models import DESCRIBE
from revisit.serve.decoder import Decoder
from servers import data_uri, serving

TOKENS, BIAS = 12, 2.0
METHOD = "revisit:alpha=1e-9"  # every token is plausible, so the bias can choose any


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose prompts open a thought, and which soon closes it."""
    folder = families.save("llava", tmp_path_factory.mktemp("thinking") / "model")
    processor = revisit.load(folder)[1]
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    processor.tokenizer.save_pretrained(folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "<think>")
    settings = folder / "generation_config.json"
    close = processor.tokenizer.convert_tokens_to_ids("</think>")
    texts = {token: processor.tokenizer.decode([token]) for token in range(close)}
    others = [
        token for token in range(families.VOCAB) if token != close and not re.fullmatch("[a-z ]+", texts.get(token, ""))
    ]
    changes = {"sequence_bias": [[[close], BIAS]], "no_repeat_ngram_size": 1, "suppress_tokens": others}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **changes}))
    return folder


def test_every_command_shows_the_same_answer(
    run: Run, thinking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "image.png"
    families.image(3, (40, 40)).save(file)
    common = (file, "--model", thinking, "--method", METHOD, "--max-new-tokens", TOKENS)
    pair = revisit.load(thinking)
    asked = revisit.ask(pair, file, method=METHOD, max_new_tokens=TOKENS)
    expected = asked.text, asked.thought, len(asked.trace.rows[0].records)
    assert asked.text
    assert asked.thought
    assert not re.search("think>", asked.text + asked.thought)

    plain = run("generate", *common)
    assert plain.out.strip() == asked.text
    line = json.loads(run("generate", *common, "--json").out)
    assert (line["text"], line["thought"], line["counters"]["steps"]) == expected
    page = tmp_path / "page.html"
    line = json.loads(run("generate", *common, "--json", "--html", page).out)
    assert (line["text"], line["thought"], line["counters"]["steps"]) == expected
    inside = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.S)
    assert inside is not None
    shown = json.loads(inside[1])["answers"][0]
    assert (shown["text"], len(shown["steps"])) == (asked.text, expected[2])

    method = revisit.methods.as_method(METHOD, pair[0])
    item = Item(id="1", prompt=DESCRIBE, images=(file,))
    (stored,) = LocalEngine(str(thinking)).answer(
        method, Decoding(max_new_tokens=TOKENS), 0, [item], [[open_image(file)]]
    )
    assert (stored.text, stored.thought, len(stored.tokens)) == expected

    with serving(decoder=Decoder(*pair), method=method) as server:
        content = [
            {"type": "image_url", "image_url": {"url": data_uri(open_image(file))}},
            {"type": "text", "text": DESCRIBE},
        ]
        reply = server.post(messages=[{"role": "user", "content": content}], max_tokens=TOKENS).json()
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], reply["usage"]["completion_tokens"]) == expected

    inputs = revisit.prepare(pair[1], DESCRIBE, open_image(file))
    output = revisit.generate(pair[0], **inputs, method=method, max_new_tokens=TOKENS)
    assert revisit.generated_text(pair[1], output, inputs) == [asked.text]

    captions: list[str] = []
    monkeypatch.setattr(calibration, "object_words", lambda: re.compile("(.)"))
    monkeypatch.setattr(calibration, "read_texts", lambda *args: captions.extend(args[5]) or [])
    greedy = revisit.ask(pair, file, method="greedy", max_new_tokens=TOKENS)
    with pytest.raises((RevisitError, ValueError)):  # one image is too few
        calibration.calibrate(*pair, [file], [{"dog"}], max_new_tokens=TOKENS)
    assert captions == [greedy.text]


def by_server(pair: Any, image: Any) -> None:
    with serving(decoder=Decoder(*pair), method=Greedy()) as server:
        content = [{"type": "image_url", "image_url": {"url": data_uri(image)}}, {"type": "text", "text": "hi"}]
        reply: httpx.Response = server.post(messages=[{"role": "user", "content": content}], max_tokens=1)
    if reply.status_code != 200:
        raise RevisitError(reply.json()["error"]["message"])


def by_engine(pair: Any, image: Any) -> None:
    item = Item(id="1", prompt="hi", images=())
    LocalEngine(pair).answer(Greedy(), Decoding(max_new_tokens=1), 0, [item], [[image]])


WAYS: dict[str, Callable[[Any, Any], object]] = {
    "generate": lambda pair, image: revisit.generate(
        pair[0], **revisit.prepare(pair[1], "hi", image), method="greedy", max_new_tokens=1
    ),
    "ask": lambda pair, image: revisit.ask(pair, image, "hi", "greedy", max_new_tokens=1),
    "evaluate": by_engine,
    "serve": by_server,
    "lens": lambda pair, image: revisit.lens(pair, image, prompt="hi"),
    "check": lambda pair, image: revisit.check(pair, image, "a", "hi", words="content"),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_have_the_same_context(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, image = families.build("llava"), families.image(1, (40, 40))
    length = revisit.prepare(pair[1], "hi", image)["input_ids"].shape[1] + (way == "check")  # its text has one token
    config = pair[0].config.get_text_config()
    monkeypatch.setattr(config, "max_position_embeddings", length)
    WAYS[way](pair, image)
    monkeypatch.setattr(config, "max_position_embeddings", length - 1)
    with pytest.raises(RevisitError, match=f"has {length} tokens.*has {length - 1}"):
        WAYS[way](pair, image)
    scaled = {**config.rope_parameters, "factor": 4.0}  # extends the context; only the declaration is read here
    monkeypatch.setattr(config, "rope_parameters", scaled)
    WAYS[way](pair, image)
