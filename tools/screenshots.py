"""Take the screenshots of docs/explain.md with the embedded model and a Chromium: python tools/screenshots.py"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image

from revisit import ReVisiT, ask, lens, load
from revisit.embedded.samples import sample
from revisit.eval.config import EvalConfig
from revisit.eval.report import sample_browser
from revisit.eval.run import run

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import chromium

IMAGES = Path(__file__).parent.parent / "docs" / "images"
PROMPT = "Please describe this image in detail."
SAMPLE = "demo"
WIDTHS = {1280: 860, 390: 844}
PORT = 7867


def shoot(
    browser: Any, name: str, url: str, prepare: Any, scheme: str = "light", heights: dict[int, int] = WIDTHS
) -> None:
    """Take one small image of a page at each width."""
    for width, height in heights.items():
        scale = 1 if width > 500 else 2
        view = {"width": width, "height": height}
        context = browser.new_context(viewport=view, color_scheme=scheme, device_scale_factor=scale)
        opened = context.new_page()
        opened.set_default_timeout(300_000)
        opened.goto(url)
        prepare(opened)
        opened.wait_for_timeout(300)
        path = IMAGES / f"{name}-{width}.png"
        opened.screenshot(path=path)
        with Image.open(path) as taken:
            taken.convert("RGB").save(path, optimize=True)
        context.close()


def answered(opened: Any) -> None:
    """Wait until the sample that the page begins with is answered."""
    opened.get_by_text("Done. Click").wait_for()


def samples_of_a_run(folder: Path) -> Path:
    """Open the sample browser of a small evaluation."""
    settings = {
        "benchmark": ["chair"],
        "method": ["greedy", "revisit"],
        "data": ["scenes:unusual:24"],
        "batch_size": 24,
    }
    logs = run(EvalConfig(**settings, out=str(folder / "runs/first")))
    return sample_browser.view(logs, folder / "samples")


def main() -> None:
    import uvicorn
    from playwright.sync_api import sync_playwright

    from revisit.serve.app import Service, build
    from revisit.serve.decoder import Decoder
    from revisit.serve.limits import Limits
    from revisit.serve.ui import add_page

    model, processor = load("tiny")
    service = Service(Decoder(model, processor), "tiny", ReVisiT.recommended(model), Limits())
    app = build(service)
    add_page(app, service)
    image = sample(SAMPLE).image()
    options = {"compare_with": "greedy", "max_new_tokens": 128, "objects": sample(SAMPLE).nouns}
    answer = ask((model, processor), image, PROMPT, **options)
    words = ["cat", "book", "oven", "motorcycle", "teddybear", "bed"]
    looked = lens((model, processor), image, words)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=PORT, log_level="error", ws="none"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        decoded = answer.save(Path(folder) / "decode.html").as_uri()
        lensed = looked.save(Path(folder) / "lens.html").as_uri()
        browser = driver.chromium.launch(executable_path=chromium.path(), args=["--no-sandbox"])
        shoot(browser, "page", decoded, lambda opened: None)
        shoot(browser, "page-dark", decoded, lambda opened: None, "dark", {1280: 860})
        shoot(browser, "view", samples_of_a_run(Path(folder)).as_uri(), lambda opened: None)
        shoot(browser, "lens", lensed, lambda opened: None)
        shoot(browser, "ui", f"http://127.0.0.1:{PORT}", answered, heights={1280: 1000, 390: 1520})
        browser.close()
    server.should_exit = True


if __name__ == "__main__":
    main()
