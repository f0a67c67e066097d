"""A real browser, and a page that collects every request and every error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import chromium


@dataclass
class Seen:
    """A browser page with its errors and requests."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")  # its event loop must be gone before tests elsewhere start loops of their own
def browser() -> Iterator[Any]:
    if reason := chromium.missing():
        pytest.skip(f"browser tests did not run: {reason}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # A container's root has no user namespaces for the sandbox; only our own pages are opened.
        launched = driver.chromium.launch(executable_path=chromium.path(), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def seen(browser: Any) -> Iterator[Seen]:
    """Open a page of 1280 × 860 that collects console errors, uncaught exceptions and requests."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, reduced_motion="reduce")
    watched = Seen(context.new_page())
    watched.page.on("console", lambda m: watched.errors.append(m.text) if m.type in ("error", "warning") else None)
    watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
    watched.page.on("request", lambda request: watched.requests.append(request.url))
    yield watched
    context.close()
