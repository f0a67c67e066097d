"""Images are opened upright and in RGB, or one clear error is raised."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from revisit import RevisitError
from revisit.io import images
from revisit.io.images import find_images, image_from_data_uri, open_image, read_image


def test_exif_orientation_is_respected(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "red")
    image.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees for display
    image.save(tmp_path / "turned.png", exif=exif)
    upright = open_image(tmp_path / "turned.png")
    assert upright.size == open_image(upright).size == (10, 20)  # rotated once
    assert upright.getpixel((9, 0)) == (0, 0, 255)


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
        assert abs(opened.getpixel((3, 3))[0] - 200) <= 4  # a palette has few colors


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA", "CMYK", "1", "I;16", "I", "F"])
def test_reading_smaller_equals_reducing_the_whole_image(mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (601, 66, 4), dtype=np.uint8)
    if mode == "I;16":
        source = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    elif mode in ("I", "F"):
        source = Image.fromarray(pixels[..., 0].astype(np.int32) * 300).convert(mode)
    else:
        source = Image.fromarray(pixels).convert("RGB" if mode == "P" else "RGBA").convert(mode)
    data = encoded(source, "TIFF")
    whole, small = open_image(data), open_image(data, scale=lambda size: 4)
    assert small.mode == "RGB"
    assert small.size == (17, 151)
    difference = np.abs(np.asarray(small).astype(int) - np.asarray(whole.reduce(4)))
    assert difference.max() == 0


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc; getrusage counts the process that started this one, too"
)
@pytest.mark.parametrize("mode", ["I;16", "P"])
def test_reading_smaller_takes_little_memory(mode: str) -> None:
    code = f"""
import io, re
from pathlib import Path
import numpy as np
from PIL import Image
from revisit.io.images import open_image
array = np.zeros((3000, 4000), np.uint16)
image = Image.fromarray(array) if {mode!r} == "I;16" else Image.new("P", (4000, 3000))
image.save(file := io.BytesIO(), "PNG", transparency=0)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
before = peak()
open_image(file.getvalue(), scale=lambda size: 8)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100  # MB; 150 and more if the whole image is converted


def test_find_images(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "notes.txt"):
        (tmp_path / name).touch()
    assert [Path(p).name for p in find_images([str(tmp_path)])] == ["a.jpg", "b.png"]
    assert find_images(["b.png"]) == ["b.png"]
    (tmp_path / "hollow").mkdir()
    with pytest.raises(RevisitError, match="hollow"):
        find_images([str(tmp_path / "hollow")])


def test_damaged_exif_data_is_ignored() -> None:
    """Every change of one byte in the header of a rotated image gives an image or a RevisitError."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    out = io.BytesIO()
    Image.new("RGB", (12, 8), "red").save(out, "JPEG", exif=exif)
    whole = out.getvalue()
    assert read_image(whole, "x").size == (8, 12)
    opened = 0
    for place in range(20, 80):
        for value in (0, 1, 5, 7, 12, 255):
            data = bytearray(whole)
            data[place] = value
            with contextlib.suppress(RevisitError):
                opened += read_image(bytes(data), "x").size in ((8, 12), (12, 8))
    assert opened > 300


PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)  # height 4, width 6


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def png() -> bytes:
    return encoded(Image.fromarray(PIXELS), "PNG")


@pytest.mark.parametrize(
    "source",
    [
        png(),
        bytearray(png()),
        memoryview(png()),
        io.BytesIO(png()),  # an open file
        "data:image/png;base64," + base64.b64encode(png()).decode(),
        Image.fromarray(PIXELS),
        PIXELS,
        PIXELS.astype(np.int64),
        PIXELS.astype(np.uint16) * 257,
        PIXELS.astype(np.float32) / 255,
        PIXELS.astype(np.float64),
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        torch.from_numpy(PIXELS).permute(2, 0, 1).double() / 255,
        np.dstack([PIXELS, np.full((4, 6), 255, dtype=np.uint8)]),
    ],
)
def test_one_image_in_any_form(source: Any) -> None:
    opened = open_image(source)
    assert opened.mode == "RGB"
    assert np.asarray(opened).tolist() == PIXELS.tolist()


def test_any_path_like_object_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png())
    with os.scandir(tmp_path) as entries:
        assert [open_image(entry).size for entry in entries] == [(6, 4)]


def test_gray_arrays() -> None:
    gray = PIXELS[..., 0]
    for source in (gray, gray[..., None], gray[None]):
        assert np.asarray(open_image(source))[..., 1].tolist() == gray.tolist()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "not an image in a supported format"),
        *((encoded(Image.new("RGB", (16, 16)), kind), "format") for kind in ("EPS", "PPM", "ICO", "PCX")),
        (encoded(Image.effect_noise((64, 64), 50), "PNG")[:-800], "truncated"),
        (7, "must be a path, bytes, an array or a PIL.Image, not int"),
        ([PIXELS], "not list; pass one image"),
        (None, "not NoneType"),
        (np.zeros((2, 3, 4, 5)), "must have the shape"),
        (np.zeros((5, 5, 2)), "must have the shape"),
        (np.zeros((0, 5, 3)), "must have the shape"),
        (np.full((4, 4), 300.5), "real numbers from 0 to 1; this one \\(float64\\)"),
        (np.full((4, 4), np.nan), "real numbers from 0 to 1"),
        (np.full((4, 4), -1), "integers from 0 to 255"),
        (np.full((4, 4), 256), "integers from 0 to 255"),
        (np.full((4, 4), "x"), "integers from 0 to 255"),
        ("https://example.org/x.png", "is a URL"),
        ("data:image/png;base64,@@@", "base64"),
        ("no-such-file.png", "no-such-file.png"),
        (Path(__file__).parent, "^'.*' is a folder, not an image file\\.$"),
        (__file__, "test_images.py"),
        ("/dev/zero", "^'/dev/zero' is not a regular file\\.$"),
    ],
)
def test_wrong_images_raise_one_sentence(source: Any, message: str) -> None:
    with pytest.raises(RevisitError, match=message) as caught:
        open_image(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_data_uri_is_never_a_path() -> None:
    with pytest.raises(RevisitError, match="data URI"):
        image_from_data_uri("/etc/passwd")


def test_limits_apply_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 10)
    (tmp_path / "x.png").write_bytes(png())
    for source in (png(), tmp_path / "x.png"):
        with pytest.raises(RevisitError, match="more than the 10 bytes allowed"):
            open_image(source)
    for source in (PIXELS, Image.fromarray(PIXELS)):
        with pytest.raises(RevisitError, match="6×4"):
            open_image(source, max_pixels=20)


@pytest.mark.parametrize("size", [(20_000, 1), (1, 201), (3, 40_000)])
def test_very_long_images_raise(size: tuple[int, int]) -> None:
    """Scaling the shorter side of 1 pixel to 336 would make the longer side of 20,000 pixels 6.7 million pixels long."""
    image = Image.new("RGB", size)
    for source in (image, np.asarray(image), encoded(image, "PNG")):
        with pytest.raises(RevisitError, match="200"):
            open_image(source)
    assert open_image(Image.new("RGB", (400, 2))).size == (400, 2)


def test_paths_as_people_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "two words").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "two words/a.png")
    for name in ("~/two words/a.png", (tmp_path / "two words/a.png").as_uri()):
        assert open_image(name).size == (8, 8)
    assert find_images([(tmp_path / "two words").as_uri()]) == [str(tmp_path / "two words/a.png")]


def test_base64_without_its_prefix_gets_a_hint() -> None:
    file = io.BytesIO()
    Image.effect_noise((200, 200), 50).save(file, "PNG")
    for length in (300, None):  # the first is short enough for the name of a file
        text = base64.b64encode(file.getvalue()).decode()[:length]
        with pytest.raises(RevisitError, match="data:image/png;base64,") as error:
            open_image(text)
        assert len(str(error.value)) < 200


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 255, 128))
    file = io.BytesIO()
    image.save(file, "PNG")
    for opened in (open_image(image), open_image(file.getvalue())):
        assert opened.getpixel((0, 0)) == (255, 255, 255)
        assert opened.getpixel((1, 0)) == pytest.approx((127, 127, 255), abs=1)  # half of each
