"""Pictures are opened upright and in RGB, or refused in one sentence."""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import families
from revisit import RevisitError
from revisit.models.images import find_images, image_from_data_uri, open_image, read_image
from revisit.models.prompts import prepare


def test_exif_orientation_is_respected(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "red")
    image.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show
    image.save(tmp_path / "turned.png", exif=exif)
    shown = open_image(tmp_path / "turned.png")
    assert shown.size == (10, 20)
    assert shown.getpixel((9, 0)) == (0, 0, 255)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "I", "F"])
def test_any_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    source = Image.new("L", (8, 8), 200)
    if mode == "I;16":
        source = Image.fromarray(np.full((8, 8), 200 * 257, dtype=np.uint16))
    elif mode != "L":
        source = source.convert("RGB").convert(mode) if mode in ("CMYK", "P", "RGBA") else source.convert(mode)
    path = tmp_path / ("x.tiff" if mode in ("CMYK", "F", "I", "I;16") else "x.png")
    source.save(path)
    opened = open_image(path)
    assert opened.mode == "RGB"
    if mode not in ("1",):
        assert abs(opened.getpixel((3, 3))[0] - 200) <= 4  # a palette has few colours


def test_refusals(tmp_path: Path) -> None:
    whole = tmp_path / "whole.png"
    Image.effect_noise((64, 64), 50).save(whole)
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[:-800])
    words = tmp_path / "words.png"
    words.write_text("not a picture")
    empty = tmp_path / "empty.jpg"
    empty.touch()
    for path, message in [
        (tmp_path / "none.png", "There is no image file"),
        (tmp_path, "is a folder"),
        (cut, "truncated or damaged"),
        (words, "not an image"),
        (empty, "not an image"),
    ]:
        with pytest.raises(RevisitError, match=message) as caught:
            open_image(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(RevisitError, match="64×64 pixels, more than the 100 allowed"):
        open_image(whole, max_pixels=100)


def test_find_images(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "notes.txt"):
        (tmp_path / name).touch()
    assert [Path(p).name for p in find_images([str(tmp_path)])] == ["a.jpg", "b.png"]
    assert [Path(p).name for p in find_images([str(tmp_path / "*.png")])] == ["b.png"]
    (tmp_path / "hollow").mkdir()
    with pytest.raises(RevisitError, match="no image files"):
        find_images([str(tmp_path / "hollow")])
    with pytest.raises(RevisitError, match="No file matches"):
        find_images([str(tmp_path / "*.bmp")])
    with pytest.raises(RevisitError, match="--allow-url"):
        find_images(["https://example.org/x.png"])


def test_data_uri() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), "green").save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert image_from_data_uri(uri).size == (5, 4)
    with pytest.raises(RevisitError, match="data URI"):
        image_from_data_uri("/etc/passwd")
    with pytest.raises(RevisitError, match="base64"):
        image_from_data_uri("data:image/png;base64,@@@")


def test_odd_exif_data_is_no_reason_to_fail() -> None:
    """Every change of one byte in the header of a turned picture gives a picture or one sentence."""

    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    out = io.BytesIO()
    Image.new("RGB", (12, 8), "red").save(out, "JPEG", exif=exif)
    whole = out.getvalue()
    assert read_image(whole, "x").size == (8, 12)
    shown = 0
    for place in range(20, 80):
        for value in (0, 1, 5, 7, 12, 255):
            data = bytearray(whole)
            data[place] = value
            with contextlib.suppress(RevisitError):
                shown += read_image(bytes(data), "x").size in ((8, 12), (12, 8))
    assert shown > 300


def test_a_picture_from_whatever_holds_one(tmp_path: Path) -> None:
    """Path, bytes, PIL image and arrays of bytes or shares give the same pixels."""
    image = families.picture(3, (9, 7))
    image.save(tmp_path / "p.png")
    pixels = np.asarray(image)
    given = [
        tmp_path / "p.png",
        str(tmp_path / "p.png"),
        (tmp_path / "p.png").read_bytes(),
        image,
        pixels,
        pixels / 255.0,
    ]
    for source in given:
        opened = open_image(source)
        assert opened.mode == "RGB"
        assert (np.asarray(opened) == pixels).all()
    assert open_image(pixels[..., 0]).size == image.size  # grey
    assert open_image(pixels[..., :1]).size == image.size


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (3, "not a int"),
        (None, "not a NoneType"),
        (b"no picture", "is not an image in a format"),
        (np.zeros((3, 8, 8)), "move the colors to the last axis"),
        (np.zeros((0, 8)), "has the shape"),
        (np.full((8, 8), 300), "bytes \\(0 to 255\\)"),
        (np.full((8, 8), np.nan), "bytes \\(0 to 255\\)"),
    ],
)
def test_what_is_no_picture_is_said(source: Any, said: str) -> None:
    with pytest.raises(RevisitError, match=said):
        open_image(source)


def test_one_prompt_and_its_picture_need_no_lists() -> None:
    _, processor = families.llava()
    image = families.picture(1)
    wanted = prepare(processor, ["What is it?"], [[image]])
    for inputs in (prepare(processor, "What is it?", image), prepare(processor, "What is it?", [image])):
        assert inputs["input_ids"].tolist() == wanted["input_ids"].tolist()
        assert (inputs["pixel_values"] == wanted["pixel_values"]).all()
    both = prepare(processor, ["What is it?", "And this?"], [image, None])
    assert len(both["input_ids"]) == 2
    with pytest.raises(RevisitError, match="must be the model's processor"):
        prepare("tiny", "What is it?", image)
