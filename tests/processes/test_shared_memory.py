"""Long bodies pass through shared memory: between real processes, with arrays that are kept, and after losses."""

import asyncio
import gc
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from processes.pipes import Owner, identity, link_of
from support.processes import process
from support.waiting import PATIENCE_S, until

from streamiter.engine.processes import shared_memory
from streamiter.engine.processes.frames import SHARED
from streamiter.engine.processes.link import ProcessLink, connect_link, listen
from streamiter.testing import VirtualClock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no files in memory without a name")

SMALL_BYTES = 8 << 20
"""A segment that four arrays fill, so that arrays also go through the socket."""


def numbers(seed: int) -> Any:
    return np.arange(seed, seed + Random(seed).randrange(10, 400_000))


async def exchange(link: ProcessLink, owner: Owner, rounds: int, seed: int) -> list[tuple[int, Any]]:
    """Send arrays of random lengths, and keep some of those that arrive; return these, with their seeds."""
    random, kept, arrived = Random(seed), list[tuple[int, Any]](), asyncio.Queue[Any]()
    owner.on_message = lambda _, message: arrived.put_nowait(message)
    for message in owner.messages:
        arrived.put_nowait(message)
    for number in range(seed, seed + rounds):
        array = numbers(number)
        copy_arrays = link.send_message([number, array])
        copy_arrays()
        array[:] = -1
        kept.append(await asyncio.wait_for(arrived.get(), PATIENCE_S))
        assert np.array_equal(kept[-1][1], numbers(kept[-1][0]))
        while len(kept) > random.randrange(1, 7):
            number_then, then = kept.pop(random.randrange(len(kept)))
            assert np.array_equal(then, numbers(number_then)), "an array was overwritten while it was kept"
            del then
    return kept


PEER = f"""
import asyncio, os, resource, sys
from processes.pipes import Owner, identity, link_of
from processes.test_shared_memory import exchange
from streamiter.engine.processes import shared_memory
from streamiter.engine.processes.link import connect_link

async def main(address, rounds, seed, may_open_files):
    def opened(link):
        if not may_open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    owner = Owner(opened)
    link = link_of(owner, identity(1))
    await connect_link(address, link)
    await owner.is_open.wait()
    kept = await exchange(link, owner, rounds, seed)
    await owner.has_ended.wait()

shared_memory._SEGMENT_BYTES = {SMALL_BYTES}
asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


def shared_files() -> list[str]:
    """Return the segments that this process has open or mapped."""
    gc.collect()
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return [name for name in [*files, *Path("/proc/self/maps").read_text().splitlines()] if "memfd:streamiter" in name]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each long body that this process sends whether it is in the segment."""
    found = list[bool]()
    put = shared_memory.LinkMemory.put

    def noted(self: shared_memory.LinkMemory, *given: Any) -> Any:
        kind, body = put(self, *given)
        found.append(kind == SHARED)
        return kind, body

    monkeypatch.setattr(shared_memory.LinkMemory, "put", noted)
    return found


@pytest.mark.parametrize("may_open_files", [True, False])
def test_arrays_arrive_whatever_the_receiver_keeps_and_stay_after_a_kill(
    tmp_path: Path, ways: list[bool], monkeypatch: pytest.MonkeyPatch, may_open_files: bool
) -> None:
    """An array was overwritten while it was kept, or was not readable after the other process was killed.

    A process that must open no more files was lost, and did not use the socket.
    """
    monkeypatch.setattr(shared_memory, "_SEGMENT_BYTES", SMALL_BYTES)

    async def main() -> None:
        owner, links = Owner(), list[ProcessLink]()

        def new_link() -> ProcessLink:
            links.append(link_of(owner, identity(0)))
            return links[0]

        server = await listen(str(tmp_path / "link"), new_link)
        command = [sys.executable, "-c", PEER, str(tmp_path / "link"), "60", "5000", str(int(may_open_files))]
        with process(command, is_forked=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}) as peer:
            await asyncio.wait_for(owner.is_open.wait(), PATIENCE_S)
            kept = await exchange(links[0], owner, 60, seed=1000)
            peer.kill()
            await asyncio.wait_for(owner.has_ended.wait(), PATIENCE_S)
        server.close()
        assert kept
        assert bool(shared_files()) is may_open_files
        for number, array in kept:
            assert np.array_equal(array, numbers(number))
            array[:] = 0

    asyncio.run(main())
    assert set(ways) == ({True, False} if may_open_files else {False})
    assert shared_files() == []


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[ProcessLink, ProcessLink, Owner]]:
    """Give two open links over a Unix socket that have mapped their segments, and the owner of the second one."""
    owners, links = (Owner(), Owner()), list[ProcessLink]()

    def new_link() -> ProcessLink:
        links.append(link_of(owners[0], identity(0)))
        return links[0]

    server = await listen(str(folder / "link"), new_link)
    second = link_of(owners[1], identity(1))
    await connect_link(str(folder / "link"), second)
    await asyncio.wait_for(asyncio.gather(*(owner.is_open.wait() for owner in owners)), PATIENCE_S)
    for link, owner in zip((links[0], second), reversed(owners), strict=True):
        link.send_message(bytes(2 << 20))
        await until(lambda owner=owner: bool(owner.messages))
        await until(lambda link=link: link._memory._is_mapped)
        owner.messages.clear()
    yield links[0], second, owners[1]
    if links[0]._state.name == "OPEN":
        links[0].abort("the test is over")
    await asyncio.wait_for(asyncio.gather(*(owner.has_ended.wait() for owner in owners)), PATIENCE_S)
    server.close()


async def test_memory_is_given_back_when_no_array_is_in_it(tmp_path: Path) -> None:
    """Each of 63 links kept the memory of a gigabyte, or an array lost its content."""
    async with joined(tmp_path) as (first, _, owner):
        assert first._memory is not None
        segment: Any = first._memory._sent
        clock = segment._clock = VirtualClock()

        def size_bytes() -> int:
            return os.fstat(segment._file).st_blocks * 512

        for length in (40, 3, 2):
            first.send_message(np.full(length << 20, length, np.uint8))
        await until(lambda: len(owner.messages) == 3)
        assert 45 << 20 <= size_bytes() < 46 << 20
        kept = owner.messages.pop(1)
        owner.messages.clear()
        await until(lambda: len(segment._counts) == 1)
        await clock.advance(0.5)
        assert size_bytes() >= 45 << 20
        await clock.advance(1.5)
        assert 3 << 20 <= size_bytes() < 4 << 20
        assert (kept == 3).all()
        del kept
        await until(lambda: not segment._counts)
        await clock.advance(2.0)
        assert size_bytes() == 0
        first.send_message(np.ones(2 << 20, np.uint8))
        await until(lambda: len(owner.messages) == 1)
        assert (owner.messages[0] == 1).all()
    assert shared_files()
    owner.messages.clear()
    assert shared_files() == []


async def test_large_arrays_do_not_go_through_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB took 17 ms from one process to another, in place of a copy in memory."""
    read = 0
    updated = ProcessLink.buffer_updated

    def counted(self: ProcessLink, count: int) -> None:
        nonlocal read
        read += count
        updated(self, count)

    async with joined(tmp_path) as (first, _, owner):
        monkeypatch.setattr(ProcessLink, "buffer_updated", counted)
        array, places = np.arange(10_000_000, dtype=np.float32), set[int]()
        for _ in range(5):
            first.send_message(["sum", array])
            await until(lambda: len(owner.messages) == 1)
            assert np.array_equal(owner.messages[0][1], array)
            places.add(owner.messages.pop()[1].ctypes.data)
            await until(lambda: not first._memory._sent._counts)  # type: ignore[union-attr]
        assert len(places) == 1
        assert read < 1000


async def test_without_memory_the_socket_is_used(tmp_path: Path, ways: list[bool]) -> None:
    """The memory of a container was exhausted, and the process was killed when it wrote."""
    async with joined(tmp_path) as (first, _, owner):
        await until(lambda: not first._memory._sent._counts)  # type: ignore[union-attr]
        ways.clear()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # No file becomes longer.
        try:
            first.send_message(np.ones(9 << 20, np.uint8))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        first.send_message(np.ones(9 << 20, np.uint8))
        await until(lambda: len(owner.messages) == 2)
        assert ways == [False, True]
        assert all((message == 1).all() and len(message) == 9 << 20 for message in owner.messages)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (SHARED, (0, 2 << 20, 4), "expected a body in free blocks, given one in block 0"),
        (SHARED, (4095, 2 << 20, 4), "ValueError: buffer is smaller than requested size"),
        (SHARED, (1 << 30, 2 << 20, 4), "ValueError: offset must be non-negative and no greater than buffer length"),
    ],
)
async def test_a_body_at_a_wrong_place_ends_the_link(
    tmp_path: Path, kind: int, body: tuple[int, ...], expected: str
) -> None:
    """A process read memory that was not of the segment, and crashed."""
    async with joined(tmp_path) as (first, second, owner):
        first.send_message(np.ones(2 << 20, np.uint8))
        first.send(0, kind, [shared_memory._PLACE.pack(*body)])
        await asyncio.wait_for(owner.has_ended.wait(), PATIENCE_S)
        assert expected in str(owner.ends[0])
        assert second._memory is None


def other_file(folder: Path) -> int:
    """Open a file of the length of a segment."""
    file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, shared_memory._SEGMENT_BYTES)
    return file


def unsealed(_: Path) -> int:
    file = os.memfd_create("streamiter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, shared_memory._SEGMENT_BYTES)
    return file


@pytest.mark.parametrize(
    ("make", "inode", "expected"),
    [
        (other_file, 1, "expected inode .* given another file"),
        (other_file, 0, "Invalid argument"),
        (unsealed, 0, "expected a file that cannot become shorter"),
    ],
)
def test_a_file_that_is_no_segment_is_not_mapped(
    tmp_path: Path, make: Callable[[Path], int], inode: int, expected: str
) -> None:
    """A container knows the process by another number, under which it has another process."""
    file = make(tmp_path)
    found = os.fstat(file)
    with pytest.raises(OSError, match=expected):
        shared_memory._mapped(os.getpid(), file, found.st_dev, found.st_ino + inode)
    os.close(file)
    with pytest.raises(FileNotFoundError):
        shared_memory._mapped(os.getpid(), file, found.st_dev, found.st_ino)
