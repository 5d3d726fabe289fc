"""Pages in a real browser: a Chromium without a window, driven by Playwright."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest_asyncio
from support.programs import system_program
from support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

__all__ = ["FLAGS", "Visit", "chromium", "visit"]

# It asks no other host for anything; without a sandbox it also runs as root.
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class Visit:
    """A page in a browser, and what the browser told about it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions of scripts."""
        self.requests: list[str] = []
        """The addresses of all requests."""
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    async def says(self, selector: str, text: str | re.Pattern[str]) -> None:
        """Wait until an element has this text in its text."""
        await self.page.locator(selector).filter(has_text=text).first.wait_for()

    async def text(self, selector: str) -> str:
        return await self.page.locator(selector).first.inner_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """A browser for all tests of a module, which share its event loop."""
    from playwright.async_api import async_playwright  # Its import takes as long as that of numpy.

    path = system_program("chromium", "chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def visit(browser: Browser, address: str, **options: Any) -> AsyncIterator[Visit]:
    """Open a page on a screen of 1280 × 800."""
    context = await browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    context.set_default_timeout(PATIENCE_S * 1_000)
    try:
        made = Visit(await context.new_page())
        await made.page.goto(address)
        yield made
    finally:
        await context.close()
