"""Open images as upright RGB, with size limits."""

from __future__ import annotations

import base64
import binascii
import glob
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as pil
from PIL import ImageOps, UnidentifiedImageError
from PIL.Image import Image

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from revisit.models.types import ImageLike

MAX_PIXELS = 100_000_000
MAX_BYTES = 200_000_000
MAX_RATIO = 200  # of the sides: image processors scale the shorter one to a fixed size
# Pillow reads more formats, some of them by starting other programs (EPS).
WEB_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMATS = (*WEB_FORMATS, "TIFF")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


def open_image(source: ImageLike, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Open an image as upright RGB.

    Args:
        source: A path, a data URI, encoded bytes, an open file, a PIL image, or an array. Arrays are (height, width) or
            (height, width, channels) with 1, 3 or 4 channels, tensors also (channels, height, width); they hold 8- or 16-bit
            integers, or real numbers from 0 to 1 (or to 255).
        max_pixels: Largest number of pixels allowed.

    Raises:
        RevisitError: The image cannot be read, or is too large.
    """
    if isinstance(source, pil.Image):
        _check_size(source.size, "given", max_pixels)
        try:
            source.load()
            return _to_rgb(upright(source))
        except RevisitError:
            raise
        except (OSError, SyntaxError, ValueError, AttributeError) as error:  # closed, truncated, of an unusual mode
            raise RevisitError(f"The PIL image, of mode {source.mode}, cannot be read: {error}.") from error
    if isinstance(source, (str, Path)):
        return _open_file(str(source), max_pixels)
    if hasattr(source, "__array__") and hasattr(source, "shape"):
        return _from_array(source, max_pixels)
    if hasattr(source, "read"):
        try:
            source = source.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise RevisitError(f"The image file cannot be read: {error}.") from error
        if isinstance(source, str):
            raise RevisitError("The image file was opened as text: open it with mode 'rb'.")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return read_image(bytes(source), "given as bytes", max_pixels=max_pixels)
    raise RevisitError(
        f"An image must be a path, bytes, an array or a PIL.Image, not {type(source).__name__}; pass one image."
    )


def _open_file(name: str, max_pixels: int) -> Image:
    if name.startswith("data:"):
        return image_from_data_uri(name, max_pixels=max_pixels)
    if name.startswith(("http://", "https://")):
        raise RevisitError(f"{name[:200]!r} is a URL, which is not downloaded: save the image first.")
    path = Path(name).expanduser()
    try:
        if not path.exists():
            raise RevisitError(f"There is no image file {name[:200]!r}; check the path.")
        if not path.is_file():
            raise RevisitError(
                f"{name!r} is {'a folder' if path.is_dir() else 'not a regular file'}, not an image file."
            )
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RevisitError(f"The image file {name[:200]!r} cannot be read: {error.strerror}.") from None
    return read_image(data, repr(name), max_pixels=max_pixels)


def _from_array(array: Any, max_pixels: int) -> Image:
    """Convert an array or a tensor to an image."""
    if hasattr(array, "detach"):  # a tensor, on any device
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    shape = tuple(array.shape)
    values = np.asarray(array)
    if values.ndim == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if 0 in shape or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))):
        raise RevisitError(
            f"An image array must have the shape (height, width) or (height, width, channels) with 1, 3 or 4 channels, not {shape}."
        )
    _check_size((values.shape[1], values.shape[0]), "given as an array", max_pixels)
    if values.dtype == np.uint16:
        values = values // 257
    if values.dtype.kind not in "buif" or not bool(((values >= 0) & (values <= 255)).all()):  # false for NaN, too
        raise RevisitError(
            f"An image array must contain integers from 0 to 255 (16-bit: to 65535) or "
            f"real numbers from 0 to 1; this one ({values.dtype}) has other values."
        )
    if values.dtype.kind in "bf":
        values = (values * (255.0 if values.max() <= 1 else 1.0)).round()
    values = values.astype(np.uint8)
    return _to_rgb(pil.fromarray(np.ascontiguousarray(values)))


def _check_size(size: tuple[int, int], what: str, max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise RevisitError(
            f"The image {what} has {width}×{height} pixels, more than the {max_pixels:,} allowed; make it smaller first."
        )
    if not width * height:
        raise RevisitError(f"The image {what} has no pixels ({width}×{height}).")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RevisitError(
            f"The image {what} has {width}×{height} pixels: one side is more than {MAX_RATIO} times as long as the other; cut it into "
            "pieces."
        )


def read_image(data: bytes, what: str, *, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = FORMATS) -> Image:
    """Decode an image file; messages call it "the image `what`"."""
    if len(data) > MAX_BYTES:
        raise RevisitError(f"The image {what} has more than the {MAX_BYTES:,} bytes allowed.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes are checked here, and odd tags do not matter
            image: Image = pil.open(io.BytesIO(data), formats=formats)
            _check_size(image.size, what, max_pixels)
            image.load()
            return _to_rgb(upright(image))
    except RevisitError:
        raise
    except UnidentifiedImageError:
        raise RevisitError(
            f"The file {what} is not an image in a supported format; convert it to PNG or JPEG."
        ) from None
    except pil.DecompressionBombError:
        raise RevisitError(
            f"The image {what} has more than the {max_pixels:,} pixels allowed; make it smaller first."
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise RevisitError(f"The image {what} is truncated or damaged ({error}); get a complete copy.") from None


def upright(image: Image) -> Image:
    """Rotate an image by its EXIF data, unless that is damaged."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Pillow's EXIF reader raises many kinds
        return image


def _to_rgb(image: Image) -> Image:
    """Convert any mode to RGB; 16- and 32-bit gray is scaled to 8 bits, not clipped."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image).astype("float32")
        if not np.isfinite(values).all():
            raise RevisitError("The image contains NaN or infinite values.")
        top = 65535.0 if image.mode.startswith("I;16") else max(float(values.max(initial=0.0)), 255.0)
        values.clip(0, top, out=values)  # in place: large images take many megabytes
        values /= top
        values *= 255
        image = pil.fromarray(values.round(out=values).astype("uint8"))
    return image if image.mode == "RGB" else image.convert("RGB")


def find_images(arguments: Sequence[str]) -> list[str]:
    """List the image files that names, folders and globs match, in the order given."""
    found: list[str] = []
    for argument in arguments:
        if Path(argument).is_dir():
            inside = sorted(str(p) for p in Path(argument).iterdir() if p.suffix.lower() in SUFFIXES)
            if not inside:
                raise RevisitError(f"The folder {argument!r} contains no image files.")
            found.extend(inside)
        elif Path(argument).exists() or not glob.has_magic(argument):
            found.append(argument)
        else:
            matches = sorted(p for p in glob.glob(argument) if Path(p).is_file())
            if not matches:
                raise RevisitError(f"No file matches {argument!r}.")
            found.extend(matches)
    return found


def image_from_data_uri(uri: str, *, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = WEB_FORMATS) -> Image:
    """Decode a `data:image/...;base64,` URI."""
    header, _, payload = uri.partition(",")
    if not header.startswith("data:image/") or not header.endswith(";base64"):
        raise RevisitError("An image must be a base64 data URI such as data:image/png;base64,…")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise RevisitError("The image's data URI is not valid base64.") from None
    return read_image(data, "in the data URI", max_pixels=max_pixels, formats=formats)
