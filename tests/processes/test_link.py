"""A link: the handshake, strangers, garbage, losses, its end, and two real processes."""

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import uvloop
from processes.pipes import Owner, Pipe, identity, link_of, open_pipe
from support.examples import random_examples
from support.processes import process
from support.waiting import PATIENCE_S, until

from streamiter.engine.processes import frames
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import Address, ProcessLink, connect_link, listen
from streamiter.engine.processes.mesh import ProcessMesh
from streamiter.engine.processes.remote_channel import ArrivingChannel, DepartingChannel
from streamiter.errors import InternalError, PlainDataError
from streamiter.testing import VirtualClock
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.plain_data import PlainData
from streamiter.values.records import DataBatch, EndOfInput

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


async def refused(first: ProcessLink, second: ProcessLink, owner: Owner) -> str:
    """Return the error of the first link; no link may open."""
    pipe = Pipe(first, second)
    await pipe.settle(Random(1))
    assert not owner.is_open.is_set()
    [error] = owner.ends
    assert error is not None
    return str(error)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (identity(1, attempt=2), "expected attempt 1, given process 1 of attempt 2"),
        (identity(1, run="run-2"), "expected run 'run-1', given process 1 of run 'run-2'"),
        (identity(1, secret=b"t" * 32), "expected the proof that it knows the secret of the run"),
        (identity(0), "expected another process, given process 0 again"),
    ],
)
async def test_a_process_of_another_attempt_is_refused(other: Any, expected: str) -> None:
    """A process that was taken for dead came back, and its records were counted twice."""
    owners = Owner(), Owner()
    mine, theirs = link_of(owners[0], identity(0)), link_of(owners[1], other)
    assert expected in await refused(mine, theirs, owners[0])
    assert not owners[1].is_open.is_set()
    assert len(owners[1].ends) == 1


async def test_a_stranger_that_repeats_what_it_hears_is_refused() -> None:
    """A stranger sent each hello and proof back, and so was taken for a process of the run."""
    owner = Owner()
    link = link_of(owner, identity(0))

    class Mirror(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.room = bytearray(100)

        def get_buffer(self, sizehint: int) -> memoryview:
            return memoryview(self.room)

        def buffer_updated(self, count: int) -> None:
            pipe.ends[1].writelines([self.room[:count]])

    mirror = Mirror()
    pipe = Pipe(link, mirror)
    await pipe.settle(Random(2))
    assert not owner.is_open.is_set()
    assert "expected another process" in str(owner.ends[0])


def some_garbage(random: Random) -> tuple[bytes, int]:
    hello = identity(1).hello()
    kind = random.randrange(4)
    if kind == 0:
        return random.randbytes(random.randrange(1, 300)), random.randrange(1 << 30)
    if kind == 1:
        return b"GET / HTTP/1.1\r\nHost: streamiter\r\n\r\n", random.randrange(1 << 30)
    cut = random.randrange(18, len(hello))
    return hello[:cut] + random.randbytes(random.choice((1, 40, 10_000))), random.randrange(1 << 30)


@random_examples(some_garbage, examples=300)
def test_garbage_of_a_stranger_is_refused_and_takes_no_memory(example: tuple[bytes, int]) -> None:
    """A port scanner ended a job, or filled its memory."""
    garbage, seed = example

    async def run() -> None:
        owner, random = Owner(), Random(seed)
        link = link_of(owner, identity(0))
        pipe = Pipe(link, asyncio.BufferedProtocol())
        pipe.ends[0].waiting.clear()
        pipe.ends[1].waiting += garbage
        while pipe.ends[1].waiting and not pipe.ends[0].is_closed:
            assert len(link.get_buffer(-1)) <= 4096
            pipe.deliver(1, random.choice((1, 7, 1000)))
            pipe.ends[0].waiting.clear()
        pipe.ends[0].lose()
        assert not owner.is_open.is_set()
        assert len(owner.ends) == 1
        assert owner.ends[0] is not None

    asyncio.run(run())


async def test_a_handshake_has_a_time_limit() -> None:
    """A stranger that said nothing kept its connection for ever, and a thousand of them all file descriptors."""
    owner, calls = Owner(), list[tuple[float, Callable[[], None]]]()
    link = link_of(owner, identity(0))

    class Manual:
        def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
            calls.append((delay_s, callback))
            return asyncio.get_running_loop().call_later(1000, callback)

    link._clock = Manual()  # type: ignore[assignment]
    pipe = Pipe(link, asyncio.BufferedProtocol())
    [(delay_s, callback)] = calls
    assert delay_s == 30
    callback()
    assert pipe.ends[0].is_closed
    pipe.ends[0].lose()
    assert "expected the handshake within 30 s, given silence" in str(owner.ends)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (frames.HEADER.pack(0, 3, frames.BATCH), "given channel 3"),
        (frames.HEADER.pack((1 << 30) + 1, 5, frames.BATCH), "frames of at most"),
        (frames.HEADER.pack(0, 0, 77), "kind of frame of this version, given 77"),
        (frames.HEADER.pack(3, 5, frames.BATCH) + b"abc", "frames that can be read, given error"),
        (frames.HEADER.pack(3, 5, frames.TAKEN) + b"abc", "given a frame of kind 3"),
        (frames.HEADER.pack(3, 0, frames.MESSAGE) + b"\0\xc1\0", "frames that can be read"),
    ],
)
async def test_a_damaged_frame_ends_the_link_with_a_clear_error(frame: bytes, expected: str) -> None:
    """Versions differed, and the job stood still without a message."""
    first, second, owner, other, pipe = await open_pipe()
    ArrivingChannel("a → b", first, 5)
    pipe.ends[1].writelines([frame])
    await pipe.settle()
    assert expected in str(owner.ends[0])
    assert "the link to process 1: expected" in str(owner.ends[0])
    assert "the link to process 0: expected CLOSE before its end" in str(other.ends[0])
    second.send_message("dropped")
    first.send_message("dropped")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_link_that_both_have_closed_ends_without_an_error_and_loses_nothing(order: tuple[int, int]) -> None:
    """The first process closed the connection, and the last records of the other one were lost."""
    first, second, *owners, pipe = await open_pipe()
    channel = DepartingChannel("a → b", second, 1), ArrivingChannel("a → b", first, 1)
    links = first, second
    links[order[0]].close()
    await pipe.settle()
    assert owners[0].ends == owners[1].ends == []
    if order[0] == 0:
        channel[0].try_put(DataBatch([1]))
        channel[0].put_control(EndOfInput())
    links[order[1]].close()
    links[order[1]].close()
    await pipe.settle()
    assert owners[0].ends == owners[1].ends == [None]
    assert (channel[1].peek() is None) is (order[0] == 1)


async def test_nothing_is_sent_behind_the_end() -> None:
    """A record behind the close frame was dropped, and no error reported it."""
    first, *_ = await open_pipe()
    first.close()
    with pytest.raises(InternalError, match="after the link was closed"):
        first.send_message(1)


async def test_frames_wait_in_the_link_while_the_transport_is_full() -> None:
    """The other process stood still, and its reports and watermarks filled the memory of this one."""
    first, second, _, owner, pipe = await open_pipe()
    writes = pipe.ends[0].writes
    first.pause_writing()
    for number in range(10):
        first.send_message(number)
        await asyncio.sleep(0)
    assert pipe.ends[0].writes == writes
    first.close()
    second.close()
    first.resume_writing()
    assert pipe.ends[0].writes == writes + 1
    await pipe.settle()
    assert owner.messages == list(range(10))
    assert owner.ends == [None]


async def test_memory_of_long_messages_is_reused_and_given_back() -> None:
    """Each of 63 links kept the memory of its last message of 1 GB."""
    first, second, _, owner, pipe = await open_pipe()
    clock = second._clock = VirtualClock()
    places = []
    for _ in range(2):
        first.send_message(np.zeros(2 << 20, np.uint8))
        await pipe.settle()
        places.append(owner.messages.pop().ctypes.data)
    assert places[0] == places[1] >= second._last_body.ctypes.data
    await clock.advance(1.0)
    assert not len(second._last_body)


async def test_a_batch_above_the_longest_frame_is_refused() -> None:
    """A batch of 5 GiB did not fit into the length of its frame, and the link broke behind it."""
    first, *_ = await open_pipe()
    channel = DepartingChannel("a → b", first, 1)
    huge = np.empty((5 << 30), np.uint8)  # It takes no memory, because it is not written.
    with pytest.raises(PlainDataError, match=r"a → b, .*at most 1024 MiB .*given 5120 MiB; emit smaller batches"):
        channel.try_put(DataBatch(huge))


# -- real sockets ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "unix":
        return str(tmp_path / "link")
    with socket.create_server(("127.0.0.1", 0)) as free:
        return ("127.0.0.1", free.getsockname()[1])


PEER = """
import asyncio, sys, uvloop, numpy as np
from processes.pipes import Owner, identity, link_of
from streamiter.engine.processes.link import connect_link
from streamiter.engine.processes.mesh import ProcessMesh
from streamiter.engine.processes.remote_channel import ArrivingChannel, DepartingChannel
from streamiter.values.records import DataBatch, EndOfInput, EpochWatermark

async def main(address):
    there = back = None
    def opened(link):
        nonlocal there, back
        there, back = ArrivingChannel("there", link, 1), DepartingChannel("back", link, 2)
    owner = Owner(opened)
    link = link_of(owner, identity(1))
    await connect_link(address, link)
    await owner.is_open.wait()
    ready = asyncio.Event()
    there.attach(ready.set)
    while True:
        if there.peek() is None:
            ready.clear()
            await ready.wait()
        item = there.take()
        if isinstance(item, EndOfInput):
            back.put_control(item)
            link.close()
            await owner.has_ended.wait()
            sys.exit(0 if owner.ends == [None] else str(owner.ends))
        while not back.try_put(item):
            await back.wait_for_room()

where = sys.argv[1] if len(sys.argv) == 2 else (sys.argv[1], int(sys.argv[2]))
uvloop.run(main(where))
"""


def peer(address: Address) -> AbstractContextManager[subprocess.Popen[Any]]:
    """Start a process that connects to an address, sends back what it gets on channel 1, and closes the link."""
    command = [sys.executable, "-c", PEER, *([address] if isinstance(address, str) else map(str, address))]
    return process(command, is_forked=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})


class Host:
    """Listens for one peer, with a channel there and a channel back."""

    def __init__(self) -> None:
        self.owner = Owner(self._opened)

    def _opened(self, link: ProcessLink) -> None:
        self.link = link
        self.there, self.back = DepartingChannel("there", link, 1), ArrivingChannel("back", link, 2)

    async def send(self, batches: list[DataBatch]) -> None:
        for batch in batches:
            while not self.there.try_put(batch):
                await self.there.wait_for_room()
        self.there.put_control(EndOfInput())

    async def returned(self) -> AsyncIterator[DataBatch]:
        ready = asyncio.Event()
        self.back.attach(ready.set)
        while True:
            while self.back.peek() is None:
                ready.clear()
                await ready.wait()
            item = self.back.take()
            if not isinstance(item, DataBatch):
                return
            yield item


def some_batches() -> list[DataBatch]:
    random = np.random.default_rng(5)
    sizes = (0, 1, 100, 5000, 9000, 20_000, 300_000, 7, 1_300_000)
    arrays = [DataBatch(random.integers(0, 256, size, np.uint8), number) for number, size in enumerate(sizes * 3)]
    lists = [DataBatch([{"n": number, "x": [1.5, None]}] * number) for number in range(0, 600, 37)]
    return [batch for pair in zip(arrays, lists, strict=False) for batch in pair]


def run(loop: str, main: Any) -> None:
    """Run a coroutine in one of the event loops, whose transports differ."""
    if loop == "uvloop":
        uvloop.run(main)
    else:
        asyncio.run(main)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_batches_travel_to_a_real_process_and_back(address: Address, loop: str) -> None:
    """Long batches arrived in pieces, and pieces of two batches were mixed."""

    async def main() -> None:
        host, batches = Host(), some_batches()
        server = await listen(address, lambda: link_of(host.owner, identity(0)))
        with peer(address) as other:
            await asyncio.wait_for(host.owner.is_open.wait(), PATIENCE_S)
            sender = asyncio.create_task(host.send(batches))
            returned = [batch async for batch in host.returned()]
            await sender
            host.link.close()
            await asyncio.wait_for(host.owner.has_ended.wait(), PATIENCE_S)
            assert other.wait(PATIENCE_S) == 0
        server.close()
        assert host.owner.ends == [None]
        assert len(returned) == len(batches)
        for before, after in zip(batches, returned, strict=True):
            assert type(after.records) is type(before.records)
            assert np.array_equal(after.records, before.records)
            assert after.epoch == before.epoch
        assert host.there.statistics().records == 0
        assert host.there.statistics().peak_records <= 1_300_000

    run(loop, main())
    gc.collect()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_killed_process_is_a_loss(address: Address, loop: str) -> None:
    """A process was killed, and the others waited for its records for ever."""

    async def main() -> None:
        host = Host()
        server = await listen(address, lambda: link_of(host.owner, identity(0)))
        with peer(address) as other:
            await asyncio.wait_for(host.owner.is_open.wait(), PATIENCE_S)
            sender = asyncio.create_task(host.send([DataBatch(np.zeros(100_000, np.uint8))] * 1000))
            async for _ in host.returned():
                other.kill()
                break
            await asyncio.wait_for(host.owner.has_ended.wait(), PATIENCE_S)
            sender.cancel()
        server.close()
        [error] = host.owner.ends
        assert "the link to process 1: expected CLOSE before its end" in str(error)

    run(loop, main())
    gc.collect()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_an_array_may_change_before_it_has_left(address: Address, loop: str) -> None:
    """A call with 40 MB was cancelled, and the other process got what its caller then wrote into the array.

    The next call overwrote the array there.
    """

    async def main() -> None:
        owner, mine = Owner(), Owner()
        server = await listen(address, lambda: link_of(owner, identity(0)))
        link = link_of(mine, identity(1))
        await connect_link(address, link)
        await asyncio.wait_for(mine.is_open.wait(), PATIENCE_S)
        waits = []
        for count, length in ((1, 4_000_000), (1, 4_000_000), (40, 100_000)):  # All are more than sockets hold.
            arrays = [np.arange(length) + len(waits) for _ in range(count)]
            copy_arrays = link.send_message(arrays)
            waits.append(link._is_paused)
            copy_arrays()
            for array in arrays:
                array[:] = -1
            await until(lambda: len(owner.messages) == len(waits))
        link.abort("the test is over")
        await asyncio.wait_for(mine.has_ended.wait(), PATIENCE_S)
        await asyncio.wait_for(owner.has_ended.wait(), PATIENCE_S)
        server.close()
        # From the second one on, a Unix socket carries only their places in shared memory.
        is_shared = isinstance(address, str) and sys.platform == "linux"
        assert waits == [True, not is_shared, not is_shared]
        for number, arrays in enumerate(owner.messages):
            for array in arrays:
                assert np.array_equal(array, np.arange(len(array)) + number)

    run(loop, main())


async def test_a_stranger_at_a_real_socket_is_cut_off_and_others_connect(tmp_path: Path) -> None:
    """After a port scan, the process accepted no more connections."""
    owner, address = Owner(), str(tmp_path / "link")
    server = await listen(address, lambda: link_of(owner, identity(0)))
    reader, writer = await asyncio.open_unix_connection(address)
    writer.write(b"x" * 100_000)
    with contextlib.suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    await asyncio.wait_for(owner.has_ended.wait(), PATIENCE_S)
    assert "the connection is not of this run" in str(owner.ends[0])
    mine = Owner()
    link = link_of(mine, identity(1))
    await connect_link(address, link)
    await asyncio.wait_for(owner.is_open.wait(), PATIENCE_S)
    await asyncio.wait_for(mine.is_open.wait(), PATIENCE_S)
    link.abort("the test is over")
    await asyncio.wait_for(mine.has_ended.wait(), PATIENCE_S)
    assert str(mine.ends[0]) == "the link to process 0: the test is over"
    server.close()


async def test_connections_over_tcp_do_not_wait_to_fill_packets(tmp_path: Path) -> None:
    """Each round of a loop waited 40 ms for an acknowledgement."""
    owner, mine = Owner(), Owner()
    server = await listen(("127.0.0.1", 0), lambda: link_of(owner, identity(0)))
    link = link_of(mine, identity(1))
    await connect_link(("127.0.0.1", server.sockets[0].getsockname()[1]), link)
    await asyncio.wait_for(mine.is_open.wait(), PATIENCE_S)
    transport: Any = link._transport
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    link.abort("the test is over")
    await asyncio.wait_for(mine.has_ended.wait(), PATIENCE_S)
    await asyncio.wait_for(owner.has_ended.wait(), PATIENCE_S)
    server.close()


async def test_a_call_that_ends_in_the_handshake_is_a_loss(tmp_path: Path) -> None:
    """The connection was taken for a stranger's: the process waited for its links forever, and its run with it."""
    path, lost = str(tmp_path / "s"), asyncio.get_running_loop().create_future()
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)
    mesh = ProcessMesh(identity(1), 2, FrameEncoding(PlainData()), SystemClock(), lambda *loss: lost.set_result(loss))
    connecting = asyncio.create_task(mesh.connect([path]))
    number, reason = await lost
    assert number == 0
    assert "in the handshake" in reason
    connecting.cancel()
    mesh.abort()
    server.close()


@pytest.mark.soak
def test_a_cable_that_is_cut_is_a_loss() -> None:
    """Both processes reached their supervisor, so nobody noticed that nothing arrived between them."""
    with process(["unshare", "-rn", "ip", "link"], **PIPES) as tried:
        tried.communicate()
        if tried.returncode:
            pytest.skip("this system does not let tests make networks")
    with process(["unshare", "-rn", sys.executable, Path(__file__).with_name("cut_network.py")], **PIPES) as running:
        printed, errors = running.communicate()
    assert running.returncode == 0, errors
    idle, sending = (line.partition(" ") for line in printed.splitlines())
    assert "TimeoutError" in idle[2]
    assert "expected the other machine to acknowledge what was sent, given silence" in sending[2]
    assert float(idle[0]) < 15
    assert float(sending[0]) < 15
