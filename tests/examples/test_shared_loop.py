"""Two processes share the loop of the example, with the commands of the page on iterations."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import sys
from pathlib import Path

import orjson
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter import topic
from streamiter.topics import ReadRequest

ROOT = Path(__file__).parents[2]
PAGES = 200


def commands() -> list[list[str]]:
    """Return the commands of the page in order."""
    text = (ROOT / "docs" / "iterations.md").read_text(encoding="utf-8")
    [block] = [each for each in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "crawl" in each]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def runnable(command: list[str]) -> list[str]:
    program, *arguments = command
    if program == "streamiter":
        return [sys.executable, "-m", "streamiter", *arguments]
    assert program == "python"
    return [sys.executable, str(ROOT / arguments[0]), *arguments[1:]]


async def visits(url: str, count: int) -> list[tuple[int, int]]:
    """Return the first visits as pairs of page and worker."""
    reader = await topic(url).open_reader(ReadRequest())
    found: list[tuple[int, int]] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < count:
                batch = await reader.read()
                assert batch is not None
                found += [
                    (each["page"], each["worker"]) for each in [orjson.loads(value or b"") for value in batch.values]
                ]
    finally:
        await reader.close()
    return found


async def test_two_processes_visit_each_page_once(tmp_path: Path) -> None:
    """A command of the page was wrong, or both processes visited a page."""
    *creating, first, second, _ = commands()
    for command in creating:
        async with async_process(runnable(command), cwd=tmp_path, is_forked=True) as child:
            assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0
    async with (
        async_process(runnable(first), cwd=tmp_path, is_forked=True) as one,
        async_process(runnable(second), cwd=tmp_path, is_forked=True, is_sigint_ignored=True) as other,
    ):
        found = await visits(f"sqlite:///{tmp_path}/crawl.db?topic=visited", PAGES)
        for child, number in ((one, signal.SIGINT), (other, signal.SIGTERM)):
            child.send_signal(number)
            assert await asyncio.wait_for(child.wait(), PATIENCE_S) == 0
    assert sorted(page for page, _ in found) == list(range(PAGES))
    assert {worker for _, worker in found} == {0, 1}
