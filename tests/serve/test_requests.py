"""Every request is either accepted or rejected with one sentence."""

from __future__ import annotations

import gc
import json
import random
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import model_validator

from chat_requests import hostile
from revisit.cli.serve import read_limits
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.models.config import describe_model
from revisit.serve import requests
from revisit.serve.errors import ApiError
from revisit.serve.limits import Limits
from revisit.serve.requests import ChatRequest, parse_body, read_request
from revisit.serve.schema import ChatBody
from revisit.serve.server import check_exposure
from servers import as_uri, bomb, data_uri

LIMITS = Limits(image_pixels=10_000, new_tokens=50, work=50_000)


def png(width: int = 8, height: int = 8) -> str:
    return data_uri(Image.new("RGB", (width, height), "red"))


def body(image: str | None = None, **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}], **fields}


def read(value: dict[str, Any] | bytes, model: Any = "llava", limits: Limits = LIMITS) -> ChatRequest:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    chat: Any = parse_body(raw, ChatBody, "tiny")
    return read_request(chat, default=ReVisiT(), limits=limits, model=model)


def rejected(value: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(value)
    return caught.value


def test_all_fields_are_read() -> None:
    settings = {"method": "revisit", "settings": {"alpha": 0.5, "layers": [1, 2]}}
    request = read(
        body(png(), max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop="x", stream=True, decoding=settings)
    )
    assert request.method == ReVisiT(alpha=0.5, layers=(1, 2))
    assert [image.size for image in request.images] == [(8, 8)]
    assert (request.decoding, request.seed) == (Decoding(max_new_tokens=7, temperature=0.5, top_p=0.9), 3)
    assert (request.chat.stop, request.chat.stream, request.record) == (["x"], True, False)
    assert request.chat.messages[0].for_template() == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}],
    }


def test_omitted_fields_have_defaults() -> None:
    request = read(body(png()))
    assert (request.method, request.decoding) == (ReVisiT(), Decoding(max_new_tokens=50))
    assert read(body(png(), temperature=0, top_p=0.5)).decoding == Decoding(max_new_tokens=50)
    # Evaluation kits request 32,768 tokens and send settings that change nothing.
    neutral: Any = {"n": 1, "repetition_penalty": 1.0, "min_p": 0, "tools": [], "tool_choice": "none", "logit_bias": {}}
    neutral |= {"service_tier": "auto", "prompt_cache_key": "x", "safety_identifier": "x", "store": False, "seed": None}
    neutral |= {
        "modalities": ["text"],
        "chat_template_kwargs": {},
        "top_k": -1,
        "skip_special_tokens": True,
        "stop": "",
    }
    neutral |= {"stop_token_ids": [], "min_tokens": 0, "ignore_eos": False, "parallel_tool_calls": True}
    harmless = body(png(), max_tokens=32768, **neutral)
    harmless["messages"][0]["content"][1]["cache_control"] = {"type": "ephemeral"}
    assert read(harmless).decoding == Decoding(max_new_tokens=50)
    assert read({**harmless, "top_k": 0}).chat.stop is None


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"modalities": ["audio"]},
            {"chat_template_kwargs": {"x": 1}},
            {"skip_special_tokens": False},
            {"min_tokens": 3},
        ),
        *({"stop_token_ids": [1]}, {"ignore_eos": True}, {"top_k": -2}, {"logit_bias": {"1": 5}}),
    ],
)
def test_values_that_would_change_the_answer_are_rejected(change: dict[str, Any]) -> None:
    assert rejected(body(png(), **change)).param == next(iter(change))


@pytest.mark.parametrize(
    "change",
    [
        {
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        {"functions": [{"name": "f"}], "function_call": "auto"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "7"}, {"role": "user", "content": "?"}]},
    ],
)
def test_tools_are_rejected_by_one_sentence(change: dict[str, Any]) -> None:
    error = rejected(body(**change))
    assert "tools" in error.message
    assert "response_format" in error.message
    assert error.param == next(name for name in ("messages", "tools", "functions", "tool_choice") if name in change)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_an_assistant_without_content_said_nothing(content: dict[str, Any]) -> None:
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [], **content}]
    chat = read(body(messages=[*history, {"role": "user", "content": "And?"}])).chat
    assert chat.messages[1].for_template()["content"] == [{"type": "text", "text": ""}]
    assert "content" in rejected(body(messages=[{"role": "user", "content": None}])).message


def test_large_images_wait_for_each_other_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LARGE", 100)
    with ThreadPoolExecutor(1) as pool:
        with requests.DECODING:
            assert read(body(png(8, 8))).images
            large = pool.submit(read, body(png(20, 20)))
            assert not wait([large], 0.3).done
        assert large.result(30).images[0].size == (20, 20)


def test_the_collector_rests_while_a_body_is_parsed() -> None:
    seen = []

    class Watched(ChatBody):
        @model_validator(mode="before")
        @classmethod
        def _watch(cls, value: object) -> object:
            seen.append(gc.isenabled())
            return value

    parse_body(json.dumps(body()).encode(), Watched, "tiny")
    with pytest.raises(ApiError):
        parse_body(json.dumps(body(seed="x")).encode(), Watched, "tiny")
    assert seen == [False, False]
    assert gc.isenabled()


def test_settings_that_a_request_leaves_out_are_recommended_for_the_model() -> None:
    for changes, neighbors in (({}, 8), ({"neighbors": 3}, 3)):
        chosen = body(png(), decoding={"method": "revisit", "settings": changes})
        assert read(chosen, describe_model("tiny")).method.settings()["neighbors"] == neighbors


def test_methods_need_an_image_unless_they_are_plain() -> None:
    assert read(body()).images == []
    assert "needs an image" in rejected(body(decoding={"method": "revisit"})).message
    for off in ({"method": "greedy"}, "greedy", "off"):
        assert read(body(png(), decoding=off)).method == read(body(decoding=off)).method == Greedy()


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (body(model="other"), "no model 'other'"),
        (body(messages=[]), "messages: List should have at least 1 item"),
        (body(messages=[{"role": "robot", "content": "x"}]), "'system', 'developer', 'user' or 'assistant'"),
        (body(messages=[{"role": "assistant", "content": "x"}]), "last message"),
        (
            body(messages=[{"role": "user", "content": [{"type": "video"}]}]),
            "messages[0].content[0]: Input tag 'video'",
        ),
        (body(messages=[{"role": "user", "content": 5}]), "messages[0].content: Input should be a valid array"),
        (body(max_tokens=0), "max_tokens: Input should be"),
        (body(temperature="hot"), "temperature: Input should be"),
        (body(temperature=float("nan")), "should be a finite number"),
        (body(n=17), "n: Input should be less than or equal to 16"),
        (body(png(), n=2, check=True), "leave out 'n'"),
        (body(min_p=0.1), "Only min_p=0 is supported"),
        (body(max_token=5), "Did you mean 'max_tokens'"),
        (body(stop=["a"] * 5), "stop: List should have at most 4 items"),
        (body(stop=["a", ""]), "stop[1]: String should have at least 1 character"),
        (body(png(), check={"words": "dogs"}), "check.words: words must be 'objects', 'content' or a list"),
        (body(check=True), "A check needs an image"),
        (body(stream="yes"), "stream: Input should be a valid boolean"),
        (body(png(), decoding={"method": "revisti"}), "Did you mean 'revisit'"),
        (body(png(), decoding={"settings": {"alhpa": 1}}), "Did you mean 'alpha'"),
        (body(png(), decoding={"settings": {"alpha": 5}}), "alpha"),
        (body(png(), stream=True, decoding={"method": "opera", "record": True}), "opera uses beam search"),
        (body(png(), check=True, decoding={"method": "opera"}), "opera uses beam search"),
        (body(png(), decoding=3), "decoding: Input should be"),
        (body(png(), method="greedy"), "Unknown request field 'method'"),
        (body("/etc/passwd"), "must be a base64 data URI"),
        (body("http://127.0.0.1:1/x.png"), "must be a base64 data URI"),
        (body("data:image/png;base64,@@@"), "not valid base64"),
        (body(as_uri(b"no image")), "not an image"),
        (body(as_uri(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), "not an image"),  # starts Ghostscript
        (body("data:text/html;base64,aGk="), "data URI"),
        (body(png(200, 200)), "200×200"),
        (body(as_uri(bomb(50_000, 50_000))), "10,000 pixels allowed"),
    ],
)
def test_errors_name_the_field(value: dict[str, Any], part: str) -> None:
    error = rejected(value)
    assert part in error.message
    assert error.status in (400, 404)
    assert error.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "decoding",
    [
        {"method": "{file}:Evil"},
        {"method": "chain", "settings": {"methods": "vcd,{file}:Evil"}},
        {"method": "chain", "settings": {"methods": ["{file}:Evil"]}},
        {"method": "chain", "settings": {"methods": [{"name": "{file}:Evil"}]}},
        {"method": "chain", "settings": {"methods": [{"name": "chain", "methods": ["{file}:Evil"]}]}},
        {"method": "chain:methods={file}:Evil"},
    ],
)
def test_a_request_runs_no_file_of_the_server(decoding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a command line `file.py:Class` names a method; in a request it must not."""
    (tmp_path / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    sent = json.loads(json.dumps(decoding).replace("{file}", "m.py"))
    monkeypatch.chdir(tmp_path)
    assert rejected(body(png(), decoding=sent)).status == 400
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "decoding",
    [
        *(
            {"method": "greedy", "settings": {"floor": 0.1, "names": names}}
            for names in (["FILE"], "FILE", [["a"], "FILE"])
        ),
        {"method": "chain", "settings": {"methods": ["vcd:names=FILE"]}},
        {"method": "chain", "settings": {"methods": [{"name": "vcd", "names": ["FILE"]}]}},
        {"method": "greedy:names=FILE"},
    ],
)
def test_a_request_reads_no_file_of_the_server(decoding: Any, tmp_path: Path) -> None:
    """On a command line `names=FILE` reads a list of names; in a request it must not."""
    (tmp_path / "names").write_text("secret, secret\nsecret")
    sent = json.loads(json.dumps(decoding).replace("FILE", str(tmp_path / "names")))
    error = rejected(body(png(), decoding=sent))
    assert error.status == 400
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (body(messages=[{"role": "user", "content": "x"}] * 300), "at most 256 items"),
        (body(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 100}]), "at most 64 items"),
        (body(messages=[{"role": "user", "content": "x" * 70_000}]), "70,000 characters"),
        (
            body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "no"}}] * 9}]),
            "9 images",
        ),
        (body(png(), decoding={"method": "chain", "settings": {"methods": ["vcd"] * 300}}), "2,000 characters"),
        (body(png(), decoding={"method": "chain", "settings": {"methods": "vcd," * 99}}), "99 methods"),
        (body(png(), decoding={"method": "chain", "settings": {"methods": ["vcd"] * 9}}), "9 methods"),
        (body(png(), decoding={"settings": {str(n): 1 for n in range(100)}}), "at most 64"),
        (body(png(), decoding={"method": "icd", "settings": {"sentence": "x" * 3000}}), "2,000 characters"),
        (body(png(), decoding={"method": "code", "settings": {"description_tokens": 10**6}}), "description_tokens"),
        (body("http://" + "x" * 5000), "must be a base64 data URI"),
        (body(png(), decoding={"method": "opera", "settings": {"beams": 17}}), "17 beams; at most 16"),
        (
            body(png(), max_tokens=50, decoding={"method": "opera", "settings": {"beams": 16, "candidates": 64}}),
            "52,000 rows",
        ),
        (body(messages=[0] * 150_000), "at most 256 items"),
        (body(messages=[0] * 3_000_000), "200,000 values"),
        (body(metadata={str(n): [] for n in range(101_000)}), "200,000 values"),
        (body(**{str(n): 0 for n in range(100_000)}), "fields; at most 64"),
    ],
)
def test_sizes_are_bounded_before_any_work(value: dict[str, Any], part: str) -> None:
    assert part in rejected(value).message


@pytest.mark.parametrize(
    "value",
    [
        body(**{"n" * 1_000_000: 1}),
        body(seed="s" * 1_000_000),
        body("/" * 1_000),
        body(messages=[{"role": "r" * 1_000_000, "content": "x"}]),
        body(png(), decoding={"method": "m" * 1_000_000}),
        body(png(), decoding={"settings": {"k" * 1_000_000: 1}}),
        body(png(), decoding={"settings": {"alpha": "a" * 1_900}}),
        body(png(), decoding={"method": "chain", "settings": {"methods": "a" * 1_900}}),
        body("data:image/png;base64," + "A" * 1_000_001),
    ],
)
def test_little_of_the_input_is_repeated(value: dict[str, Any]) -> None:
    assert len(json.dumps(rejected(value).body())) < 1000


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'"x"', b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_object_are_rejected(raw: bytes) -> None:
    with pytest.raises(ApiError, match=r"JSON|object"):
        read(raw)


@pytest.mark.parametrize("seed", range(0, 300, 100))
def test_random_requests_are_accepted_or_rejected(seed: int) -> None:
    """Whatever the body, the only exception is an error with a status for the client."""
    statuses = set()
    for number in range(seed, seed + 100):
        try:
            read(hostile(random.Random(number)))
        except ApiError as error:
            statuses.add(error.status)
            json.dumps(error.body())
    assert statuses <= {400, 404}
    assert 400 in statuses


def test_only_loopback_needs_no_key() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, None, False)
    for host in ("0.0.0.0", "192.168.1.2", "example.org"):
        with pytest.raises(RevisitError, match="REVISIT_API_KEY"):
            check_exposure(host, None, False)
        check_exposure(host, "key", False)
        check_exposure(host, None, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("queue=0", "--limits: queue must be"),
        ("queue=many", "queue must be"),
        ("seconds=inf", "seconds must be"),
        ("new_token=5", "Did you mean 'new_tokens'"),
    ],
)
def test_wrong_limits_are_rejected(values: str, message: str) -> None:
    with pytest.raises(RevisitError) as caught:
        read_limits([values])
    assert message in str(caught.value)


def test_limits_of_the_command_line() -> None:
    assert read_limits(["new_tokens=16", "seconds=5"]) == Limits(new_tokens=16, seconds=5)
    assert read(body(), limits=Limits(new_tokens=5)).decoding == Decoding(max_new_tokens=5)


def test_every_limit_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
    for name, limit in Limits.model_fields.items():
        value = f"{limit.default:,}" if isinstance(limit.default, int) else f"{limit.default:g}"
        assert f"| `{name}` | {value} | {limit.description} |" in page, name
