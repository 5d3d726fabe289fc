"""Measure a link between two processes: arrays, columns and dicts, compared with a restricted pickle on a bare socket.

Run as a program, the module is the process that receives: ``python -m benchmarks.link (link|pickle) SOCKET``.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from struct import Struct
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate
from benchmarks.session import Session, running
from streamiter.engine.processes.frames import FrameEncoding
from streamiter.engine.processes.link import LinkError, LinkIdentity, ProcessLink, connect_link, listen
from streamiter.engine.processes.remote_channel import ArrivingChannel, DepartingChannel
from streamiter.values.helpers.clock import SystemClock
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, Columns, Control, DataBatch, EndOfInput

__all__ = ["link"]

_LENGTH: Final = Struct("<Q")
_LIMIT_S: Final = 120.0

# What a restricted pickle of plain data must import.
_ALLOWED: Final = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def link(session: Session) -> Iterator[Figure]:
    """Batches are sent to another process over a Unix socket, as many at a time as a channel holds."""
    dicts, columns = _dicts(1000), _columns(10_000)
    sent: dict[str, tuple[Batch, int]] = {
        "array of 1 KB": (np.arange(128.0), session.size(20_000, 100)),
        "array of 80 KB": (np.arange(10_000.0), session.size(5_000, 20)),
        "array of 1 MB": (np.arange(131_072.0), session.size(500, 5)),
        "array of 10 MB": (np.arange(1_310_720.0), session.size(50, 3)),
        "10 dicts": (dicts[:10], session.size(10_000, 20)),
        "1,000 dicts": (dicts, session.size(300, 5)),
        "columns of 240 KB": (columns, session.size(2_000, 10)),
    }
    for name, (batch, count) in sent.items():
        ours, other = f"link, {name}", f"pickle, {name}"
        contenders = {other: _measured("pickle", batch, count), ours: _measured("link", batch, count)}
        series = alternate(contenders, repeat=session.repeat)
        yield series.figure(other, "batches/s")
        yield series.figure(ours, "batches/s", compared_with=other, target=Target("ratio", at_least=1.0))


def _dicts(count: int) -> list[dict[str, Any]]:
    random = Random(1)
    return [
        {"user": random.randrange(10**6), "item": f"item{random.randrange(1000)}", "price": random.random(), "ok": True}
        for _ in range(count)
    ]


def _columns(count: int) -> Columns:
    numbers = np.arange(count)
    return Columns({"user": numbers, "price": numbers / 7.0, "clicked": numbers % 2})


def _measured(way: str, batch: Batch, count: int) -> Contender:
    def run() -> Trial:
        watch = Stopwatch()
        received = uvloop.run(_SENDERS[way](batch, count, watch))
        return Trial(watch.rates(count, "batches"), received)

    return run


def _checked(batch: Any) -> int:
    """Return a number that depends on a record of the batch."""
    record = batch[len(batch) // 2]
    return int(record["user"] if isinstance(record, dict) else record)


# -- a link -----------------------------------------------------------------------------------------------------


class _Owner:
    """Makes the channel of a link when it opens."""

    def __init__(self, make: Callable[[ProcessLink], Any]) -> None:
        loop = asyncio.get_running_loop()
        self.opened_with: asyncio.Future[tuple[ProcessLink, Any]] = loop.create_future()
        self.answer: asyncio.Future[Any] = loop.create_future()
        self.end: asyncio.Future[LinkError | None] = loop.create_future()
        self._make = make

    def opened(self, link: ProcessLink) -> None:
        self.opened_with.set_result((link, self._make(link)))

    def received(self, link: ProcessLink, message: Any) -> None:
        self.answer.set_result(message)

    def ended(self, link: ProcessLink, error: LinkError | None) -> None:
        self.end.set_result(error)


def _new_link(owner: _Owner, process: int) -> ProcessLink:
    identity = LinkIdentity(process, "run", 1, "fingerprint", b"secret")
    return ProcessLink(identity, owner, FrameEncoding(PlainData()), SystemClock())


async def _send_by_link(batch: Batch, count: int, watch: Stopwatch) -> int:
    owner = _Owner(lambda link: DepartingChannel("benchmark", link, 1))
    with tempfile.TemporaryDirectory() as folder:
        server = await listen(f"{folder}/link", lambda: _new_link(owner, 0))
        with running(_receiver("link", folder), limit_s=_LIMIT_S):
            link, channel = await owner.opened_with
            with watch:
                for _ in range(count):
                    while not channel.try_put(DataBatch(batch)):
                        await channel.wait_for_room()
                channel.put_control(EndOfInput())
                received: int = await owner.answer
            link.close()
            assert await owner.end is None
        server.close()
    return received


async def _receive_by_link(address: str) -> None:
    owner = _Owner(lambda link: ArrivingChannel("benchmark", link, 1))
    await connect_link(address, _new_link(owner, 1))
    link, channel = await owner.opened_with
    ready = asyncio.Event()
    channel.attach(ready.set)
    received = 0
    while True:
        if channel.peek() is None:
            ready.clear()
            await ready.wait()
        item = channel.take()
        if isinstance(item, Control):
            break
        received += _checked(item.records)
    link.send_message(received)
    link.close()
    await owner.end


# -- a restricted pickle -------------------------------------------------------------------------------------------


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _as_pickled(batch: Batch) -> Any:
    return batch.arrays if isinstance(batch, Columns) else batch


async def _send_by_pickle(batch: Batch, count: int, watch: Stopwatch) -> int:
    connected = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        server = await asyncio.start_unix_server(lambda *ends: connected.set_result(ends), f"{folder}/link")
        with running(_receiver("pickle", folder), limit_s=_LIMIT_S):
            reader, writer = await connected
            with watch:
                for _ in range(count):
                    data = pickle.dumps(_as_pickled(batch), 5)
                    writer.writelines((_LENGTH.pack(len(data)), data))
                    await writer.drain()
                writer.write(_LENGTH.pack(0))
                received = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
            writer.close()
        server.close()
    return int(received)


async def _receive_by_pickle(address: str) -> None:
    reader, writer = await asyncio.open_unix_connection(address, limit=1 << 24)
    received = 0
    while length := _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]:
        batch = _Restricted(io.BytesIO(await reader.readexactly(length))).load()
        received += _checked(Columns(batch) if isinstance(batch, dict) else batch)
    writer.write(_LENGTH.pack(received))
    writer.close()
    await writer.wait_closed()


_SENDERS: Final[dict[str, Callable[[Batch, int, Stopwatch], Coroutine[Any, Any, int]]]] = {
    "link": _send_by_link,
    "pickle": _send_by_pickle,
}


def _receiver(way: str, folder: str) -> list[str | os.PathLike[str]]:
    return [sys.executable, "-m", "benchmarks.link", way, str(Path(folder) / "link")]


if __name__ == "__main__":
    uvloop.run({"link": _receive_by_link, "pickle": _receive_by_pickle}[sys.argv[1]](sys.argv[2]))
