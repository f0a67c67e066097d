"""Opening pictures the way a person sees them: upright, in RGB, and never a surprise in size."""

from __future__ import annotations

import base64
import binascii
import glob
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000
MAX_BYTES = 200_000_000
# Pillow reads more formats, some of them by starting other programs (EPS): files from others are held to these.
WEB_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMATS = (*WEB_FORMATS, "TIFF", "PPM", "AVIF")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif"}


def open_image(source: str | Path | bytes | Image | Any, *, max_pixels: int = MAX_PIXELS) -> Image:
    """A picture in RGB, upright, from a path, the bytes of a file, a PIL image, or an array of pixels (rows, columns[, 3]).

    One clear sentence if it cannot be had.
    """
    if isinstance(source, (bytes, bytearray)):
        return read_image(bytes(source), "these bytes", max_pixels=max_pixels)
    if not isinstance(source, (str, Path)):
        return _from_object(source, max_pixels)
    path = Path(source)
    if not path.exists():
        raise RevisitError(f"There is no image file {str(path)!r}; check the path.")
    if path.is_dir():
        raise RevisitError(f"{str(path)!r} is a folder, not an image file.")
    try:
        with path.open("rb") as file:
            return read_image(file, str(path), max_pixels=max_pixels)
    except PermissionError as error:
        raise RevisitError(f"The image file {str(path)!r} may not be read: {error.strerror}.") from error


def _from_object(source: Any, max_pixels: int) -> Image:
    """A PIL image as it is seen, or an array of pixels: bytes, or numbers from 0 to 1."""
    from PIL import Image

    if isinstance(source, Image.Image):
        if source.width * source.height > max_pixels:
            raise RevisitError(
                f"The image has {source.width}×{source.height} pixels, more than the {max_pixels:,} allowed; make it smaller first."
            )
        return _to_rgb(upright(source))
    if not hasattr(source, "__array__"):
        raise RevisitError(
            f"An image is a path, bytes, a PIL image or an array of pixels, not a {type(source).__name__}."
        )
    import numpy as np

    pixels = np.asarray(source)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in (1, 3, 4)) or not pixels.size:
        raise RevisitError(
            f"An array of pixels has the shape (rows, columns) or (rows, columns, 3), not {tuple(pixels.shape)}; "
            "move the colors to the last axis."
        )
    if pixels.shape[0] * pixels.shape[1] > max_pixels:
        raise RevisitError(f"The array has more than the {max_pixels:,} pixels allowed; make it smaller first.")
    if pixels.dtype.kind == "f" and pixels.min() >= 0 and pixels.max() <= 1:
        pixels = (pixels * 255).round()
    if pixels.dtype.kind not in "uif" or not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 255):
        raise RevisitError("An array of pixels holds bytes (0 to 255), or numbers from 0 to 1.")
    return _to_rgb(
        Image.fromarray(pixels.astype("uint8").squeeze(-1) if pixels.shape[-1:] == (1,) else pixels.astype("uint8"))
    )


def read_image(source: Any, what: str, *, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS) -> Image:
    """The picture in a binary file object (or bytes); `what` names it in messages, `formats` are the file types read."""
    import warnings

    from PIL import Image, UnidentifiedImageError

    if isinstance(source, bytes):
        source = io.BytesIO(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit below is ours, and odd tags do not matter
            Image.init()
            image: Image.Image = Image.open(source, formats=[name for name in formats if name in Image.OPEN])
            width, height = image.size
            if width * height > max_pixels:
                raise RevisitError(
                    f"The image {what!r} has {width}×{height} pixels, more than the {max_pixels:,} allowed; make it smaller first."
                )
            image.load()
            image = upright(image)
    except UnidentifiedImageError:
        raise RevisitError(
            f"{what!r} is not an image in a format that can be read; convert it to PNG or JPEG."
        ) from None
    except Image.DecompressionBombError:
        raise RevisitError(
            f"The image {what!r} has more than the {max_pixels:,} pixels allowed; make it smaller first."
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        if isinstance(error, RevisitError):
            raise
        raise RevisitError(f"The image {what!r} is truncated or damaged ({error}); get a whole copy.") from None
    return _to_rgb(image)


def upright(image: Image) -> Image:
    """The picture as its camera held it; whatever else its EXIF data says, and however damaged it is."""
    from PIL import Image as pil

    turns = pil.Transpose
    try:
        turn = {  # by the tag for the orientation
            2: turns.FLIP_LEFT_RIGHT,
            3: turns.ROTATE_180,
            4: turns.FLIP_TOP_BOTTOM,
            5: turns.TRANSPOSE,
            6: turns.ROTATE_270,
            7: turns.TRANSVERSE,
            8: turns.ROTATE_90,
        }.get(int(image.getexif().get(0x0112, 1)))
    except Exception:  # Pillow's reader of tags raises what it likes
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image) -> Image:
    """Any mode as RGB; 16- and 32-bit grey is scaled to 8 bits instead of being cut off."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        import numpy as np
        from PIL import Image as pil

        values = np.asarray(image).astype("float64")
        top = 65535.0 if image.mode.startswith("I;16") else max(float(values.max(initial=0.0)), 255.0)
        image = pil.fromarray((values.clip(0, top) / top * 255).round().astype("uint8"))
    return image if image.mode == "RGB" else image.convert("RGB")


def find_images(arguments: Sequence[str], *, allow_url: bool = False) -> list[str]:
    """The image files that names, folders, globs and (if allowed) URLs stand for, in the order given."""
    found: list[str] = []
    for argument in arguments:
        if argument.startswith(("http://", "https://")):
            if not allow_url:
                raise RevisitError(f"{argument!r} is a URL, and nothing is fetched unless --allow-url is given.")
            found.append(argument)
        elif Path(argument).is_dir():
            inside = sorted(str(p) for p in Path(argument).iterdir() if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise RevisitError(f"The folder {argument!r} holds no image files.")
            found.extend(inside)
        elif Path(argument).exists() or not glob.has_magic(argument):
            found.append(argument)
        else:
            matches = sorted(p for p in glob.glob(argument) if Path(p).is_file())
            if not matches:
                raise RevisitError(f"No file matches {argument!r}.")
            found.extend(matches)
    return found


def image_from_data_uri(uri: str, *, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = WEB_FORMATS) -> Image:
    """The picture in a `data:image/...;base64,` URI."""
    header, _, payload = uri.partition(",")
    if not header.startswith("data:image/") or not header.endswith(";base64"):
        raise RevisitError("An image must be a base64 data URI such as data:image/png;base64,…")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise RevisitError("The image's data URI is not valid base64.") from None
    return read_image(data, "data URI", max_pixels=max_pixels, formats=formats)
