"""The picture of the page in the documents: ``make pictures`` takes it of the service of the demo, in a browser."""

import argparse
import asyncio
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.async_api import async_playwright
from support.chromium import FLAGS
from support.processes import async_process
from support.programs import system_program

FILE = Path(__file__).parents[2] / "docs" / "pictures" / "service-page.png"
EVENTS_PER_S = 1_000
SIZE = {"width": 1460, "height": 720}
SCALE = 1920 / 1460
"""The picture has 1920 columns: sharp in a page of half that width on most screens. It ends below the flow."""
COLOURS = 256
"""As many as make no visible difference, in a third of the bytes."""


async def take(minutes: float, file: Path) -> None:
    """Run the service until its charts have so many minutes, and all is well; then take the picture."""
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, "-m", "streamiter", "demo", "--serve", "--rate", str(EVENTS_PER_S), "-d", folder]
        pipe = asyncio.subprocess.PIPE
        limit_s = 60 * minutes + 300
        async with (
            async_process(demo, limit_s=limit_s, stdout=pipe, stderr=asyncio.subprocess.DEVNULL) as service,
            async_playwright() as playwright,
        ):
            assert service.stdout is not None
            address = None
            while address is None:
                address = re.search(r"http://127\.0\.0\.1:\d+/", (await service.stdout.readline()).decode())
            browser = await playwright.chromium.launch(
                executable_path=system_program("chromium", "chromium"), args=FLAGS
            )
            page = await browser.new_page(viewport=SIZE, device_scale_factor=SCALE, color_scheme="light")  # type: ignore[arg-type]
            await asyncio.sleep(60 * minutes)
            await page.goto(address[0])
            await page.locator("#sentence").filter(has_text="All is well").wait_for()
            await page.screenshot(path=file)
            await browser.close()
            with Image.open(file) as picture:
                picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
            service.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--file", type=Path, default=FILE)
    given = parser.parse_args()
    asyncio.run(take(given.minutes, given.file))
