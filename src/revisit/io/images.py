"""Open images as upright RGB, with size limits."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeAlias

import numpy as np
from PIL import Image as pil
from PIL import ImageOps, UnidentifiedImageError
from PIL.Image import Image
from pydantic import BeforeValidator

from revisit.errors import RevisitError
from revisit.io.files import local_path
from revisit.io.finder import image_files

if TYPE_CHECKING:
    from torch import Tensor

    # A path, encoded bytes, an open file, a PIL image, or an array of pixels (height, width, 3).
    ImageLike: TypeAlias = (
        str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image | np.ndarray | Tensor
    )
else:
    ImageLike = Any

logger = logging.getLogger(__name__)

Size = tuple[int, int]  # width, height
Scale = Callable[[Size], int]  # the size of an image -> how many times smaller to read it, a power of two
SCALE = "revisit_scale"  # the entry of `Image.info` with the factor by which an image was read smaller

STRIP = 32  # rows of a reduced image that are computed at a time
MAX_PIXELS = 100_000_000
MAX_BYTES = 200_000_000
MAX_RATIO = 200  # of the longer side to the shorter one, which image processors scale to a fixed size
# Pillow reads more formats, some of them by starting other programs (EPS).
WEB_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FORMATS = (*WEB_FORMATS, "TIFF")
DAMAGE = (OSError, SyntaxError, ValueError, AttributeError, EOFError)  # raised by Pillow


def open_image(source: ImageLike, *, max_pixels: int = MAX_PIXELS, scale: Scale | None = None) -> Image:
    """Open an image as upright RGB, on white where it is transparent; of an animation, the first frame.

    Args:
        source: A path, a data URI, encoded bytes, an open file, a PIL image, or an array. Arrays are (height, width) or
            (height, width, channels) with 1, 3 or 4 channels, tensors also (channels, height, width); they hold 8- or 16-bit
            integers, or real numbers from 0 to 1 (or to 255).
        max_pixels: Largest number of pixels allowed.
        scale: How many times smaller to read an encoded image of this size; images in memory keep theirs.

    Raises:
        RevisitError: The image cannot be read, or is too large.
    """
    if isinstance(source, str) and source.startswith("data:"):
        return image_from_data_uri(source, max_pixels=max_pixels, scale=scale)
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        return read_image(_read_file(name), repr(name), max_pixels=max_pixels, scale=scale)
    if isinstance(source, pil.Image):
        return _upright_rgb(source, f"of mode {source.mode}", max_pixels)
    if hasattr(source, "__array__"):
        return _upright_rgb(_from_array(source), "given as an array", max_pixels)
    if hasattr(source, "read"):
        source = source.read(MAX_BYTES + 1)
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise RevisitError(
            f"An image must be a path, bytes, an array or a PIL.Image, not {type(source).__name__}; pass one image."
        )
    return read_image(bytes(source), "given as bytes", max_pixels=max_pixels, scale=scale)


def listed(source: Any) -> Sequence[Any] | None:
    """Return several images as a sequence: a list, or a column of a table, which may read each image when it is used.

    None for a single image.
    """
    kind = getattr(getattr(source, "dtype", None), "kind", "")
    pixels = hasattr(source, "__array__") and kind != "O"  # a column of objects is no array of pixels
    if pixels or isinstance(source, (str, bytes, bytearray, memoryview, Mapping)) or not hasattr(source, "__getitem__"):
        return None
    return source if isinstance(source, Sequence) else list(source)


def _need_images(source: object) -> Sequence[Any] | None:
    images = listed(source)
    if images is None and source is not None:
        raise RevisitError(f"The images must be a list or a column of a table, not {source!r:.80}.")
    return images


# For functions that are `validated`: pydantic alone would copy a column, and so read all of its images.
ImageList = Annotated[Any, BeforeValidator(_need_images)]
TextList = Annotated[Sequence[str], BeforeValidator(lambda texts: texts if listed(texts) is None else list(texts))]


def original_size(image: Image) -> Size:
    """Return the size that an opened image has in its file."""
    scale = image.info.get(SCALE, 1)
    return image.width * scale, image.height * scale


def reduction(size: Size, side: int) -> int:
    """Return the largest power of two that divides both sides and leaves the shorter one at least `side` long."""
    factor = 1
    while min(size) >= 2 * factor * side and not any(length % (2 * factor) for length in size):
        factor *= 2
    return factor


def _read_file(name: str) -> bytes:
    if name.startswith(("http://", "https://")):
        raise RevisitError(f"{name[:200]!r} is a URL, which is not downloaded: save the image first.")
    path = local_path(name)
    if os.path.isdir(path):  # unlike Path.is_dir, false for any error
        raise RevisitError(f"{name[:200]!r} is a folder, not an image file.")
    if os.path.exists(path) and not os.path.isfile(path):
        raise RevisitError(f"{name[:200]!r} is not a regular file.")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if re.fullmatch(r"[A-Za-z0-9+/\s]{200,}={0,2}\s*", name):
            problem = "is no path; if it is an image in base64, write 'data:image/png;base64,' (or jpeg, …) before it"
            raise RevisitError(f"{name[:40]!r}… {problem}.") from None
        if isinstance(error, FileNotFoundError):
            raise RevisitError(f"There is no image file {name[:200]!r}; check the path.") from None
        reason = getattr(error, "strerror", None) or error
        raise RevisitError(f"The image file {name[:200]!r} cannot be read: {reason}.") from None


def _from_array(array: Any) -> Image:
    """Convert an array or a tensor to an image."""
    if hasattr(array, "detach"):  # a tensor, on any device
        array = array.detach().cpu()
        array = array.float() if array.is_floating_point() else array
    values = np.asarray(array)
    shape = values.shape
    if values.ndim == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if 0 in shape or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))):
        raise RevisitError(
            f"An image array must have the shape (height, width) or (height, width, channels) with 1, 3 or 4 channels, not {shape}."
        )
    if values.dtype == np.uint16:
        values = values // 257
    if values.dtype.kind not in "buif" or not bool(((values >= 0) & (values <= 255)).all()):  # false for NaN, too
        raise RevisitError(
            "An image array must contain integers from 0 to 255 (16-bit: to 65535) or real numbers from 0 to 1; "
            f"this one ({values.dtype}) has other values."
        )
    if values.dtype.kind in "bf":
        values = (values * (255.0 if values.max() <= 1 else 1.0)).round()
    return pil.fromarray(np.ascontiguousarray(values.astype(np.uint8)))


def read_image(
    data: bytes,
    what: str,
    *,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] = FORMATS,
    scale: Scale | None = None,
) -> Image:
    """Decode the bytes of an image file; error messages call it "the image `what`"."""
    if len(data) > MAX_BYTES:
        raise RevisitError(f"The image {what} has more than the {MAX_BYTES:,} bytes allowed.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked below, and odd tags do not matter
            image = pil.open(io.BytesIO(data), formats=formats)
            if image.format in WEB_FORMATS and getattr(image, "is_animated", False):
                logger.warning("The image %s is animated; its first frame is used.", what)
            return _upright_rgb(image, what, max_pixels, scale)
    except UnidentifiedImageError:
        raise RevisitError(
            f"The file {what} is not an image in a supported format; convert it to PNG or JPEG."
        ) from None
    except pil.DecompressionBombError:
        raise RevisitError(
            f"The image {what} has more than the {max_pixels:,} pixels allowed; make it smaller first."
        ) from None
    except RevisitError:
        raise
    except DAMAGE as error:
        raise RevisitError(f"The image {what} is truncated or damaged ({error}); get a complete copy.") from None


def _upright_rgb(image: Image, what: str, max_pixels: int, scale: Scale | None = None) -> Image:
    """Check the size of an image, decode it, and make it upright, RGB and smaller by `scale`."""
    width, height = image.size
    if width * height > max_pixels:
        raise RevisitError(
            f"The image {what} has {width}×{height} pixels, more than the {max_pixels:,} allowed; make it smaller first."
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RevisitError(
            f"The image {what} has {width}×{height} pixels: one side is more than {MAX_RATIO} times as long as the other; cut it into "
            "pieces."
        )
    factor = 1 if scale is None else scale(image.size)
    try:
        if factor > 1:
            image.draft(None, (width // factor, height // factor))  # JPEG decodes at 1/2, 1/4 or 1/8
        image.load()
        with contextlib.suppress(Exception):  # Pillow's EXIF reader raises many kinds
            image = ImageOps.exif_transpose(image)
        left = factor * max(image.size) // max(width, height)
        image = _to_rgb(image, _brightest(image)) if left == 1 else _small_rgb(image, left)
        image.info[SCALE] = factor
        return image
    except DAMAGE as error:
        raise RevisitError(
            f"The image {what} is truncated, closed or damaged ({error}); get a complete copy."
        ) from None


def _small_rgb(image: Image, factor: int) -> Image:
    """Convert an image to RGB and reduce it, in strips: the whole of a 16-bit photograph would take 150 MB on the way."""
    if image.mode in ("L", "RGB"):
        return image.reduce(factor).convert("RGB")
    small, brightest = pil.new("RGB", (-(-image.width // factor), -(-image.height // factor))), _brightest(image)
    for top in range(0, image.height, STRIP * factor):
        strip = image.crop((0, top, image.width, min(top + STRIP * factor, image.height)))
        small.paste(_to_rgb(strip, brightest).reduce(factor), (0, top // factor))
    return small


def _brightest(image: Image) -> float:
    """Return the value that becomes white in gray of more than 8 bits."""
    return max(float(image.getextrema()[1]), 255.0) if image.mode in ("I", "F") else 65535.0  # type: ignore[arg-type]


def _to_rgb(image: Image, brightest: float) -> Image:
    """Convert any mode to RGB; 16- and 32-bit gray is scaled to 8 bits, not clipped."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.array(image, dtype="float32")
        values.clip(0, brightest, out=values)  # in place, because a photograph has 48 MB here
        values *= 255 / brightest
        image = pil.fromarray(values.round(out=values).astype("uint8"))
    if image.has_transparency_data:  # the color of transparent pixels is arbitrary
        image = image.convert("RGBA")
        image = pil.alpha_composite(pil.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def find_images(arguments: Sequence[str]) -> list[str]:
    """List images and videos in the given order; a folder stands for all that are in it and its subfolders."""
    files: list[str] = []
    for argument in arguments:
        if local_path(argument).is_dir():
            inside = image_files(local_path(argument))
            if not inside:
                raise RevisitError(f"The folder {argument!r} contains no image or video files.")
            files.extend(map(str, inside))
        else:
            files.append(argument)
    return files


def image_from_data_uri(
    uri: str,
    *,
    max_pixels: int = MAX_PIXELS,
    formats: tuple[str, ...] = WEB_FORMATS,
    scale: Scale | None = None,
) -> Image:
    """Decode a `data:image/...;base64,` URI."""
    data = data_uri_bytes(uri, "image", "png")
    return read_image(data, "in the data URI", max_pixels=max_pixels, formats=formats, scale=scale)


def data_uri_bytes(uri: str, kind: str, example: str) -> bytes:
    """Return the file in a `data:KIND/...;base64,` URI."""
    header, _, payload = uri.partition(",")
    if not header.startswith(f"data:{kind}/") or not header.endswith(";base64"):
        raise RevisitError(f"A file must be a base64 data URI such as data:{kind}/{example};base64,…")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError:
        raise RevisitError(f"The {kind}'s data URI is not valid base64.") from None
