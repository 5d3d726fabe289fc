"""Random runs of clients on a server, whose requests reach each shard in order, but with delays drawn from a seed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from parameter_server.consistency.brute_force import BruteForce, Change, Event, Verdict

from streamiter.errors import OutOfTurn, ServerReset, UnknownWorker
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.server import ParameterServer
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.storage.block import Block
from streamiter.values.plain_data import PlainData


class LateLink:
    """A link from one client to one shard; a request waits here until ``deliver``."""

    def __init__(self, shard: Shard, pace: float) -> None:
        self.pace = pace
        """The weight of this link when the next delivery is drawn."""
        self._shard = shard
        self._requests: deque[tuple[Any, WaitingReply[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def send(self, request: Any) -> WaitingReply[Any]:
        waiting: WaitingReply[Any] = WaitingReply()
        self._requests.append((request, waiting))
        return waiting

    def deliver(self) -> None:
        request, waiting = self._requests.popleft()
        try:
            reply = self._shard.handle(request)
        except Exception as error:
            waiting.fail(error)
            return
        if not isinstance(reply, WaitingReply):
            waiting.succeed(reply)
            return

        def settle() -> None:
            try:
                waiting.succeed(reply.result())
            except Exception as error:
                waiting.fail(error)

        reply.when_settled(settle)


class LateServer:
    """Shards that receive requests with different delays."""

    def __init__(self, shards: int, seed: int) -> None:
        self.random = Random(seed)
        self.shards = [Shard(number) for number in range(shards)]
        self.directory = MatrixDirectory(self.shards)
        self._links: list[LateLink] = []
        self.clients: list[Client] = []
        """All clients, also clients that are still joining."""

    async def client(self, worker: int) -> Client:
        links = [LateLink(shard, self.random.choice((1, 0.1, 0.01))) for shard in self.shards]
        self._links += links
        client = Client(worker, links, self.directory, cache_bytes=self.random.choice((0, 1 << 20)))
        self.clients.append(client)
        await client.join()
        return client

    async def run(self, *programs: Coroutine[Any, Any, None]) -> None:
        """Deliver one request after another until all programs have ended."""
        tasks = [asyncio.ensure_future(program) for program in programs]
        await turns()
        while busy := [link for link in self._links if link]:
            [link] = self.random.choices(busy, [link.pace for link in busy])
            link.deliver()
            await turns()
        stuck = [task for task in tasks if not task.done()]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        for task in tasks:
            if task not in stuck:
                task.result()
        assert not stuck, f"{len(stuck)} workers wait forever"


ROWS, COLUMNS = 2, 7

ClientKind = Literal["get", "add", "add_get", "clock", "leave", "join", "cancel", "reset", "restore"]

CLIENT_STEPS: tuple[ClientKind, ...] = (
    *("get",) * 6,
    *("add",) * 4,
    *("clock",) * 7,
    *("add_get", "leave", "join", "cancel", "reset", "restore"),
)

Numbers = npt.NDArray[np.int64]


class ClientStep(NamedTuple):
    kind: ClientKind
    worker: int


@dataclass(frozen=True)
class Stir(UpdateFunction):
    """Changes all values at the end of an iteration, so that adds before and after it do not commute."""

    matrix: str

    def partition_update(self, block: Block, part: Any) -> None:
        for row in block.rows:
            values = block.dense_row(row)
            values[:] = stirred(values)


def stirred(values: Numbers) -> Numbers:
    return (values * 37 + 1) % 1_000_003


class Keys(NamedTuple):
    """The row, columns and values of a call, drawn from its number, so that a history determines all calls."""

    row: int
    columns: list[int] | None
    values: list[int]

    @classmethod
    def of(cls, number: int) -> Keys:
        random = Random(number)
        columns = None if random.random() < 0.3 else random.choices(range(COLUMNS), k=random.randrange(1, 6))
        width = COLUMNS if columns is None else len(columns)
        return cls(random.randrange(ROWS), columns, random.choices(range(1, 100), k=width))


class ClientRun:
    """A server with its clients, and the brute force that gives the expected answers."""

    def __init__(
        self,
        consistency: Consistency,
        workers: int,
        shards: int,
        block: tuple[int, int] | None,
        *,
        read_my_writes: bool,
    ) -> None:
        self.consistency = consistency
        self.shards = shards
        self.block = block
        self.read_my_writes = read_my_writes
        self.server = ParameterServer(shards=shards)
        self.clients: dict[int, Client] = {}
        self.expected = BruteForce(consistency, range(workers))
        self.base = np.zeros((ROWS, COLUMNS), np.int64)
        """The values at the last reset."""
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        """The tasks of waiting gets, by number."""
        self.keys: dict[int, Keys] = {}
        """The keys of each call, by number."""
        self.finished: list[int] = []
        """The numbers of finished calls, in the order in which they finished."""

    async def start(self) -> None:
        await self.server.create_matrix(
            "w",
            rows=ROWS,
            columns=COLUMNS,
            dtype="int64",
            consistency=self.consistency,
            block=self.block,
            on_clock=Stir("w"),
        )
        for worker in self.expected.history[0].workers:
            self._make_client(worker)

    def _make_client(self, worker: int) -> None:
        self.clients[worker] = self.server.client(worker, read_my_writes=self.read_my_writes)

    async def happen(self, step: ClientStep) -> None:
        """Make one call and check all of its effects."""
        client = self.clients.get(step.worker)
        number = len(self.expected.history)
        keys = Keys.of(number)
        match step.kind:
            case "reset":
                await self._reset()
            case "restore":
                await self._restore()
            case "cancel":
                await self._cancel(step.worker)
            case "join":
                if self.expected.progress(step.worker) is None:
                    self.expected.happen(Event("join", step.worker))
                    self._make_client(step.worker)
            case _ if client is None:
                pass
            case "leave":
                await self._leave(client)
            case "clock":
                await self._call(client.clock("w"), Event("clock", step.worker))
            case "add":
                adding = client.add("w", row=keys.row, columns=keys.columns, values=keys.values)
                await self._call(adding, Event("add", step.worker))
            case "get":
                await self._call(client.get("w", row=keys.row, columns=keys.columns), Event("get", step.worker))
            case "add_get":
                call = client.add_get("w", row=keys.row, columns=keys.columns, values=keys.values)
                await self._call(call, Event("add", step.worker), Event("get", step.worker))
        self._check_state()

    async def _call(self, call: Any, *events: Event) -> None:
        """Make a call that counts as one or two events; the last event decides whether the call waits."""
        keys, number = Keys.of(len(self.expected.history)), -1
        for event in events:
            number = len(self.expected.history)
            outcome = self.expected.happen(event)
            if outcome.verdict in ("unknown", "out of turn"):
                break
        task = self.tasks[number] = asyncio.ensure_future(call)
        self.keys[number] = keys
        task.add_done_callback(lambda task: self.finished.append(number))
        await turns()
        kind = self.expected.history[number].kind
        wanted = "now" if outcome.verdict == "later" and kind != "get" else outcome.verdict
        assert verdict_of(task) == wanted, f"event {number}, {events}"
        if kind != "get" or wanted in ("unknown", "out of turn"):
            del self.tasks[number]
            self.finished.remove(number)
        if kind == "clock" and wanted == "now":
            assert task.result() == self.expected.min_clock()
        self._check_answers(outcome.values)

    def _check_answers(self, wanted: dict[int, int]) -> None:
        """Check that exactly these gets are answered, and with the expected values."""
        finished, self.finished = self.finished, []
        if self.shards == 1:  # with several shards, one client may get its reply later than another
            assert finished == list(wanted)
        assert sorted(finished) == sorted(wanted)
        for get in finished:
            row, columns, _ = self.keys[get]
            values = self._values_now(get)[row]
            np.testing.assert_array_equal(self.tasks.pop(get).result(), values if columns is None else values[columns])

    async def _leave(self, client: Client) -> None:
        worker = client.worker
        waiting = [n for n in self.expected.waiting_gets() if self.expected.history[n].worker == worker]
        for get in waiting:
            self.expected.happen(Event("forget", to=get))
        if self.expected.progress(worker) is None:
            await client.leave()  # a second leave does nothing
            return
        outcome = self.expected.happen(Event("leave", worker))
        await client.leave()
        await turns()
        self._check_failed(waiting, UnknownWorker)
        self._check_answers(outcome.values)

    async def _cancel(self, which: int) -> None:
        waiting = self.expected.waiting_gets()
        if waiting:
            get = waiting[which % len(waiting)]
            self.expected.happen(Event("forget", to=get))
            self.tasks[get].cancel()
            await turns()
            assert self.tasks.pop(get).cancelled()
            self.finished.remove(get)

    async def _reset(self) -> None:
        waiting, workers = self.expected.waiting_gets(), tuple(self.server.workers)
        self.base = self._stored(self.expected.changes_applied())
        await self.server.reset()
        self.expected.happen(Event("start", workers=workers))
        await turns()
        self._check_failed(waiting, ServerReset)

    async def _restore(self) -> None:
        """Take a snapshot, encode and decode it, and restore it into the same server."""
        waiting = self.expected.waiting_gets()
        plain = PlainData()
        state = plain.decode(plain.encode(await self.server.snapshot()))
        self.expected.happen(Event("restore"))
        await self.server.restore(state)
        await turns()
        self._check_failed(waiting, ServerReset)

    def _check_failed(self, waiting: Sequence[int], error: type[Exception]) -> None:
        for get in waiting:
            assert isinstance(self.tasks.pop(get).exception(), error)
            self.finished.remove(get)

    def _values_now(self, get: int) -> Numbers:
        """Return the expected values of a get that has just been answered."""
        when = len(self.expected.history) - 1
        values = self._stored(self.expected.changes_read(get, when, self.expected.wanted(get) if get != when else None))
        if self.read_my_writes:
            for number in self.expected.pending_adds(self.expected.history[get].worker):
                self._add(number, values)
        return values

    def _stored(self, changes: Sequence[Change]) -> Numbers:
        values = self.base.copy()
        for kind, number in changes:
            if kind == "add":
                self._add(number, values)
            else:
                values = stirred(values)
        return values

    @staticmethod
    def _add(number: int, values: Numbers) -> None:
        row, columns, given = Keys.of(number)
        np.add.at(values[row], slice(None) if columns is None else columns, np.array(given))

    def _check_state(self) -> None:
        waiting = len(self.expected.waiting_gets())
        assert len(self.tasks) == waiting
        for shard in self.server.statistics().shards:
            for matrix in shard.matrices:
                assert matrix.minimum_clock == self.expected.min_clock()
                assert matrix.waiting <= waiting


def verdict_of(task: asyncio.Task[Any]) -> Verdict:
    """Return the verdict on a call so far."""
    if not task.done():
        return "later"
    match task.exception():
        case None:
            return "now"
        case UnknownWorker():
            return "unknown"
        case OutOfTurn():
            return "out of turn"
        case error:
            raise error


async def turns(count: int = 6) -> None:
    """Run the event loop for as many turns as any call needs."""
    for _ in range(count):
        await asyncio.sleep(0)


async def play(run: ClientRun, steps: Sequence[ClientStep]) -> None:
    """Make these calls one after another and check each; raise where a result differs."""
    await run.start()
    try:
        for step in steps:
            await run.happen(step)
    finally:
        await run.server.close()
        for task in run.tasks.values():
            task.cancel()
        await asyncio.gather(*run.tasks.values(), return_exceptions=True)


def random_client_steps(random: Random, workers: int, count: int = 50) -> list[ClientStep]:
    return [ClientStep(random.choice(CLIENT_STEPS), random.randrange(workers)) for _ in range(count)]
