"""Build self-contained HTML documents: style, script, data and images are inside, and nothing is fetched."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError, as_path
from revisit.io.files import write_text

if TYPE_CHECKING:
    from jinja2 import Environment
    from PIL.Image import Image

    from revisit.models.geometry import Layout

LONGEST_SIDE = 1024  # of an image in a page; models get the original
# A page that works from disk and sends nothing anywhere.
OFFLINE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
START = """const data = JSON.parse(document.getElementById("data").textContent), main = document.getElementById("main");
"""


def script_page(
    title: str,
    data: object,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    start: str,
    heading: str = "",
    meta: str = "",
    policy: str = OFFLINE,
) -> str:
    """Render a page drawn by the named scripts and then `start`, which finds the data as `data` and the element to fill as `main`."""
    return fill(
        "page.html",
        title=title,
        heading=heading or title,
        meta=meta,
        policy=policy,
        style="".join(map(asset, ["base.css", *styles])),
        script="".join(map(asset, scripts)) + START + start,
        data=embed(data),
    )


def static_page(title: str, body: str, style: str, meta: str | None = None) -> str:
    """Render a page without scripts; `body` is escaped HTML, and `style` names an asset. With `meta` the title is its heading."""
    heading, styles = "" if meta is None else title, asset("base.css") + asset(style)
    return fill("page.html", title=title, heading=heading, meta=meta, policy=OFFLINE, style=styles, body=body)


def fill(template: str, **values: object) -> str:
    """Fill in a template of the assets; values are escaped unless the template marks them as safe."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def asset(name: str) -> str:
    """Return the text of an asset."""
    return resources.files("revisit.pages").joinpath("assets", name).read_text("utf-8")


def notebook_frame(page: str, title: str) -> str:
    """Wrap a page in a sandboxed frame for notebooks."""
    source = html.escape(page, quote=True)
    style = "width:100%;height:720px;border:1px solid #ccc"
    return f"<iframe srcdoc='{source}' sandbox='allow-scripts' style='{style}' title='{html.escape(title)}'></iframe>"


def embed(data: object) -> str:
    """Serialize data as JSON that cannot end the script element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def data_uri(image: Image) -> str:
    """Encode an image as a data URI, scaled down if it is large: PNG for small images, JPEG for others."""
    small = image.convert("RGB")
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    out = io.BytesIO()
    if small.width * small.height <= 256 * 256:
        small.save(out, "PNG", optimize=True)
        kind = "png"
    else:
        small.save(out, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


def images_payload(images: list[Image], layout: Layout) -> dict[str, Any]:
    """Return the data of images, and of the grids of vision tokens on them in pixels of the originals."""
    sizes, times = layout.sizes or [image.size for image in images], layout.times or [None] * len(images)
    return {
        "images": [
            {"src": data_uri(image), "w": w, "h": h, **({} if time is None else {"time": round(time, 3)})}
            for image, (w, h), time in zip(images, sizes, times, strict=True)
        ],
        "grids": [
            {
                "image": grid.image,
                "frames": grid.frames,
                "view": grid.view,
                "first": grid.first,
                "rows": grid.rows,
                "columns": grid.columns,
                "gap": grid.gap,
                "xs": [[round(a, 2), round(b, 2)] for a, b in grid.xs],
                "ys": [[round(a, 2), round(b, 2)] for a, b in grid.ys],
            }
            for grid in layout.grids
        ],
        "reason": layout.reason,
    }


def check_writable(path: str | Path) -> Path:
    """Return the path of a file to write; raise RevisitError for a folder, or if its folder does not exist."""
    path = as_path(path)
    if path.is_dir():
        raise RevisitError(f"{path} is a folder: use a file in it, such as {path / 'page.html'}.")
    if not path.parent.is_dir():
        raise RevisitError(f"{path} cannot be written: there is no folder {path.parent}; use another path.")
    return path


def check_page(path: str | Path, inputs: Iterable[str | Path] = ()) -> Path:
    """Return the path of a page to write; raise RevisitError unless its name ends in .html and it replaces no input."""
    path = check_writable(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise RevisitError(f"{path} is not a page: its name must end in .html.")
    if path.exists() and any(Path(name).exists() and path.samefile(name) for name in inputs):
        raise RevisitError(f"{path} is the input file and would be overwritten: use another output name.")
    return path


def write_page(path: str | Path, text: str) -> Path:
    """Write a page into an existing folder; return its path."""
    path = check_writable(path)
    write_text(path, text)
    return path
