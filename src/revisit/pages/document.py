"""Self-contained HTML documents: style, script, data and pictures are inside, and nothing is fetched."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from jinja2 import Template
    from PIL.Image import Image

LONGEST_SIDE = 1024  # of a picture in a page; the model saw the original
# A page that works from disk and sends nothing anywhere.
OFFLINE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
START = """document.getElementById("buttons").append(themeButton());
const data = JSON.parse(document.getElementById("data").textContent), main = document.getElementById("main");
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
    """A page drawn by scripts: the named assets, then `start`, which finds the JSON data as `data`, the place to draw as `main`."""
    return _render(
        title=title,
        heading=heading or title,
        meta=meta,
        policy=policy,
        style="".join(map(asset, styles)),
        script="".join(map(asset, scripts)) + START + start,
        data=embed(data),
    )


def static_page(title: str, body: str, style: str) -> str:
    """A page without scripts; `body` is HTML, already escaped, and `style` names an asset."""
    return _render(title=title, body=body, style=asset(style), policy=OFFLINE)


def _render(*, title: str, heading: str = "", meta: str = "", **trusted: str) -> str:
    """The template filled in: these texts are escaped; `trusted` ones are ours and are inserted as they are."""
    from markupsafe import Markup

    safe = {name: Markup(text) for name, text in trusted.items()}
    return _template().render(title=title, heading=heading, meta=meta, **safe)


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.update(body="", script="", style="", data="")
    return environment.from_string(asset("page.html"))


def asset(name: str) -> str:
    """The text of a file that pages are made of."""
    return resources.files("revisit.pages").joinpath("assets", name).read_text("utf-8")


def embed(data: object) -> str:
    """JSON that cannot end the script element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def data_uri(image: Image) -> str:
    """The image as a data URI, scaled down if it is large: PNG for small pictures, JPEG for others."""
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


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be written there; raises RevisitError if not, before any work is done for it."""
    path = Path(path)
    if path.is_dir():
        raise RevisitError(f"{path} is a folder: use a file in it, such as {path / 'page.html'}.")
    if path.parent.is_file():
        raise RevisitError(f"{path} cannot be written: {path.parent} is a file.")
    if not path.absolute().parent.is_dir():
        raise RevisitError(f"{path} cannot be written: there is no folder {path.parent}; create it first.")
    try:  # a trial: rights alone do not tell what a file system allows
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise RevisitError(f"{path} cannot be written: {error.strerror}; use another path.") from error
    return path


def check_page(path: Path, inputs: Iterable[str | Path]) -> None:
    """Raises RevisitError unless a page can be written there, before any work is done for it."""
    if path.suffix.lower() not in (".html", ".htm") and not path.is_dir():
        raise RevisitError(f"{path} is not a page: its name must end in .html.")
    check_writable(path)
    check_apart(path, inputs)


def check_apart(path: Path, inputs: Iterable[str | Path]) -> None:
    """Raises RevisitError if a file written there would replace one of the inputs."""
    if path.exists() and any(Path(name).exists() and path.samefile(name) for name in inputs):
        raise RevisitError(f"{path} is the input file and would be overwritten: use another output name.")


def write_page(path: str | Path, text: str) -> Path:
    """Write a page into a folder that is there; returns its path."""
    path = check_writable(path)
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise RevisitError(f"{path} cannot be written: {error.strerror}.") from error
    return path
