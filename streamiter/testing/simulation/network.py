"""The network of a simulation, with its faults, and topics and a checkpoint store behind it.

``Faults`` are what a user allows; ``Levels`` are the probabilities that one seed draws. The ``SimulatedNetwork`` is one
for a simulation; each run of the job has a ``NetworkConnection``, which its crash cuts. ``SimulatedTopic`` and
``SimulatedStore`` are a memory topic and a memory store whose calls may be late, fail, or fail after they took effect.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from streamiter.engine.storage.snapshot import PartsFile, SnapshotHeader, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore, OtherFiles
from streamiter.errors import StorageFull, TopicUnavailable
from streamiter.testing.simulated_time import Crashed, SimulatedTime, Trace
from streamiter.topics.memory import MemoryBroker, MemoryTopic
from streamiter.topics.topic import (
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicBatch,
    TopicReader,
    TopicWriter,
    Transactions,
)
from streamiter.values.numbers import whole_number


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of the first phase of a simulation; each seed chooses some of them.

    >>> Faults(fenced=False, crashes=1).crashes
    1
    """

    crashes: int = 5
    """The most early ends of the job: by a crash, a stop, or a pause during which another run starts."""
    slow: bool = True
    """Calls of topics and of the store take up to some seconds."""
    stuck: bool = True
    """No call returns for up to two minutes."""
    failing: bool = True
    """Calls fail before or after they take effect: a commit may succeed although it raises an error."""
    duplicates: bool = True
    """Writes outside transactions are stored twice, as by a retry after a lost answer."""
    fenced: bool = True
    """Another owner opens the job's transactions."""
    storage_full: bool = True
    """The store has no room for a snapshot."""
    lost: bool = True
    """One of several processes dies or is frozen, or a connection of two is cut, or carries nothing for up to 20 s."""

    def __post_init__(self) -> None:
        whole_number("Faults: crashes", self.crashes, 0)

    @classmethod
    def none(cls) -> Faults:
        """Return no faults; tasks still run in shuffled order, and batches are cut at random."""
        switches = {field.name: False for field in fields(cls) if field.name != "crashes"}
        return cls(crashes=0, **switches)


@dataclass(frozen=True, slots=True)
class Levels:
    """The probability of each fault, for each call."""

    slow: float = 0.0
    """A call is slow."""
    slow_s_max: float = 0.0
    """The longest slow call."""
    stuck: float = 0.0
    """The network is stuck from this call on."""
    stuck_s_max: float = 0.0
    """The longest time for which it is stuck."""
    failing: float = 0.0
    """A call fails; drawn before and after its effect."""
    duplicates: float = 0.0
    """A write is stored twice."""
    fenced: float = 0.0
    """Another owner opens the transactions; for each turn of the job."""
    storage_full: float = 0.0
    """The store is full when a snapshot is saved."""
    lost: float = 0.0
    """A process dies or is frozen, or a connection is disturbed; for each turn of the job."""
    cuts_batches: bool = True
    """Whether batches that are read are cut into pieces of random size."""


CALM: Final = Levels()
UNDISTURBED: Final = Levels(cuts_batches=False)
# Most slow calls are within the deadlines of connectors; some take as long as the election of a Kafka leader.
_SLOW_S_MAX: Final = 2.0
# Longer than the sessions and transactions of a simulation, so that they expire.
_STUCK_S_MAX: Final = 120.0


def drawn_levels(faults: Faults, chosen: random.Random, processes: int = 1) -> Levels:
    """Return the levels of one seed.

    Half of the seeds leave out each kind of fault: a fault that ends every run early hides other bugs, which the seeds
    without it find (Groce et al., "Swarm testing", ISSTA 2012).
    """

    def level(wanted: bool, highest: float) -> float:
        drawn = chosen.random() < 0.5, chosen.random()
        return highest * drawn[1] if wanted and drawn[0] else 0.0

    return Levels(
        slow=level(faults.slow, 0.5),
        slow_s_max=_SLOW_S_MAX * chosen.choice([0.01, 0.1, 1.0]),
        stuck=level(faults.stuck, 0.01),
        stuck_s_max=_STUCK_S_MAX * chosen.random(),
        failing=level(faults.failing, 0.02),
        duplicates=level(faults.duplicates, 0.5),
        fenced=level(faults.fenced, 0.002),
        storage_full=level(faults.storage_full, 0.3),
        lost=level(faults.lost, 0.002) if processes > 1 else 0.0,
    )


class SimulatedUnavailable(TopicUnavailable):
    """A fault: the call failed, before or after it took effect."""


class SimulatedStorageFull(StorageFull):
    """A fault: the store is full."""


P = ParamSpec("P")
T = TypeVar("T")
# This share of the calls that are not slow lets other tasks run in between; a crash may happen there.
_PAUSES: Final = 0.3


class SimulatedNetwork:
    """The network between all runs of the job and the world; its state survives crashes."""

    def __init__(self, time: SimulatedTime, trace: Trace, chosen: random.Random, levels: Levels) -> None:
        self.random = chosen
        self.levels = levels
        self.trace = trace
        self._time = time
        self._stuck_until_s = 0.0
        self._waiting: list[asyncio.Future[None]] = []

    def event(self, what: str) -> None:
        """Add an event to the trace."""
        self.trace.event(self._time.now_s, what)

    def heal(self) -> None:
        """End all faults; calls that are stuck return."""
        self.levels = CALM
        self._stuck_until_s = 0.0
        self._wake()

    def draws(self, probability: float) -> bool:
        """Draw whether a fault of this probability happens now."""
        return probability > 0.0 and self.random.random() < probability

    async def delay(self, what: str) -> None:
        """Wait as long as a call takes on its way, in one direction."""
        levels = self.levels
        if self.draws(levels.stuck):
            stuck_s = self.random.random() * levels.stuck_s_max
            self.event(f"stuck for {stuck_s:.1f} s, from: {what}")
            self._stuck_until_s = max(self._stuck_until_s, self._time.now_s + stuck_s)
            self._time.call_later(stuck_s, self._wake)
        if self.draws(levels.slow):
            await asyncio.sleep(self.random.random() * levels.slow_s_max)
        elif self.random.random() < _PAUSES:
            await asyncio.sleep(0)
        while self._time.now_s < self._stuck_until_s:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def fail(self, what: str) -> None:
        """Draw whether a call fails, and raise SimulatedUnavailable if it does."""
        if self.draws(self.levels.failing):
            self.event(f"fails: {what}")
            raise SimulatedUnavailable(f"{what}: unavailable (simulated)")

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)


class NetworkConnection:
    """The connection of one run of the job to the network; the crash of the run cuts it."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self._is_cut = False

    def cut(self) -> None:
        """Cut the connection after a crash: no further call takes effect."""
        self._is_cut = True

    def check(self) -> None:
        """Raise :class:`Crashed` if the job has crashed."""
        if self._is_cut:
            raise Crashed

    async def call(self, what: str, effect: Callable[[], Awaitable[T]]) -> T:
        """Await an effect: perhaps late, perhaps not at all, perhaps with an error after it."""
        await self.on_the_way(what)
        result = await effect()
        await self.on_the_way_back(what)
        return result

    async def on_the_way(self, what: str) -> None:
        """Wait on the way to the effect; fail now and then."""
        self.check()
        await self.network.delay(what)
        self.network.fail(f"{what}, before it took effect")

    async def on_the_way_back(self, what: str) -> None:
        """Wait on the way back; fail now and then."""
        await self.network.delay(what)
        self.network.fail(f"{what}, after it took effect")

    async def slow_call(self, what: str, effect: Callable[[], Awaitable[T]]) -> T:
        """Await an effect, perhaps late; never fail."""
        self.check()
        await self.network.delay(what)
        return await effect()


def by_network(
    what: str, method: Callable[Concatenate[Any, P], Awaitable[T]], *, fails: bool = True
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method that awaits ``method`` of ``self._stored`` by way of ``self._connection``.

    ``what`` is a format string; it gets the object as ``{0}``. Without ``fails``, the call is only late.
    """

    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        send = self._connection.call if fails else self._connection.slow_call
        stored = getattr(self._stored, method.__name__)
        result: T = await send(what.format(self), lambda: stored(*args, **kwargs))
        return result

    return call


class SimulatedTopics:
    """The topics of a simulation, as one run of the job sees them."""

    def __init__(self, broker: MemoryBroker, connection: NetworkConnection, on_commit: Callable[[], None]) -> None:
        self.broker = broker
        self.connection = connection
        self.on_commit = on_commit
        self.readers: list[SimulatedReader] = []
        """The open readers."""
        self.transactional_ids: dict[str, None] = {}
        """The ids of transactions that were opened, so that another owner can open them."""


# The most records of a read: so few that small inputs are read in several batches.
_READ_RECORDS_MAX = 16


class SimulatedTopic(Topic):
    """A :class:`~streamiter.topics.MemoryTopic` whose calls may be late, take effect twice, or fail."""

    compaction_settings = MemoryTopic.compaction_settings
    eager_compaction_settings = MemoryTopic.eager_compaction_settings

    def __init__(self, cluster: SimulatedTopics, name: str) -> None:
        self._cluster = cluster
        self._connection = cluster.connection
        self._stored = cluster.broker.topic(name)

    @property
    def url(self) -> str:
        return self._stored.url

    @property
    def name(self) -> str:
        return self._stored.name

    @property
    def commit_domain(self) -> str:
        return "memory:simulation"

    def beside(self, name: str) -> Topic:
        return SimulatedTopic(self._cluster, name)

    async def open_reader(self, request: ReadRequest) -> TopicReader:
        network = self._connection.network
        if network.levels.cuts_batches:
            limit = network.random.randint(1, _READ_RECORDS_MAX)
            request = replace(request, max_records=min(request.max_records, limit))
        stored = await self._connection.call(f"open a reader of {self.name}", lambda: self._stored.open_reader(request))
        reader = SimulatedReader(stored, self._connection, self.name, self._cluster.readers.remove)
        self._cluster.readers.append(reader)
        return reader

    async def open_writer(self) -> TopicWriter:
        stored = await self._connection.call(f"open a writer of {self.name}", self._stored.open_writer)
        return SimulatedWriter(stored, self._connection, self.name)

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> Transactions:
        self._cluster.transactional_ids[transactional_id] = None
        stored = await self._connection.call(
            f"open transactions {transactional_id}",
            lambda: self._stored.open_transactions(transactional_id, timeout_s=timeout_s),
        )
        return SimulatedTransactions(stored, self._connection, self._cluster.broker, self._cluster.on_commit)

    create = by_network("create {0.name}", Topic.create)
    describe = by_network("describe {0.name}", Topic.describe)
    delete = by_network("delete {0.name}", Topic.delete)

    async def size_limit(self) -> SizeLimit | None:
        return await self._stored.size_limit()


class SimulatedReader(TopicReader):
    """A reader that returns the batches of another reader, later and in smaller pieces."""

    def __init__(
        self, stored: TopicReader, connection: NetworkConnection, name: str, on_close: Callable[[SimulatedReader], None]
    ) -> None:
        self._stored = stored
        self._connection = connection
        self._name = name
        self._on_close: Callable[[SimulatedReader], None] | None = on_close
        self._rest: TopicBatch | None = None

    async def read(self) -> TopicBatch | None:
        if self._rest is None:
            await self._connection.on_the_way(f"read {self._name}")
            # Kept before the next wait: a cancelled read must not lose records.
            self._rest = await self._stored.read()
        await self._connection.on_the_way_back(f"read {self._name}")
        return self._piece()

    def _piece(self) -> TopicBatch | None:
        batch = self._rest
        if batch is None:
            return None
        network = self._connection.network
        size = network.random.randint(1, len(batch)) if network.levels.cuts_batches else len(batch)
        self._rest = batch[size:] if size < len(batch) else None
        return batch[:size]

    def positions(self) -> Mapping[int, int]:
        positions = dict(self._stored.positions())
        if self._rest is not None:
            positions[self._rest.partition] = self._rest.offsets[0]
        return positions

    def identities(self) -> Mapping[int, str]:
        return self._stored.identities()

    def lag(self) -> Mapping[int, int]:
        lag = dict(self._stored.lag())
        if self._rest is not None:
            lag[self._rest.partition] += len(self._rest)
        return lag

    async def close(self) -> None:
        self._connection.check()
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None
        await self._stored.close()


class SimulatedWriter(TopicWriter):
    """A writer whose writes, outside transactions, may be late, stored twice, or fail after they took effect."""

    def __init__(self, stored: TopicWriter, connection: NetworkConnection, name: str) -> None:
        self._stored = stored
        self._connection = connection
        self._name = name

    async def write(self, batch: OutgoingBatch) -> None:
        await self._connection.call(f"write to {self._name}", lambda: self._write(batch))

    async def _write(self, batch: OutgoingBatch) -> None:
        await self._stored.write(batch)
        network = self._connection.network
        if network.draws(network.levels.duplicates):
            network.event(f"written twice: {len(batch)} records to {self._name}")
            await self._stored.write(batch)

    flush = by_network("flush {0._name}", TopicWriter.flush)
    close = by_network("close the writer of {0._name}", TopicWriter.close, fails=False)


class SimulatedTransactions(Transactions):
    """Transactions of memory topics; each call may be late, fail, or fail after it took effect."""

    def __init__(
        self, stored: Transactions, connection: NetworkConnection, broker: MemoryBroker, on_commit: Callable[[], None]
    ) -> None:
        self._stored = stored
        self._connection = connection
        self._broker = broker
        self._on_commit = on_commit

    begin = by_network("begin a transaction", Transactions.begin)
    abort = by_network("abort the transaction", Transactions.abort)
    close = by_network("close the transactions", Transactions.close, fails=False)

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        stored = self._broker.topic(topic.name)
        await self._connection.call(
            f"write to {topic.name} in the transaction", lambda: self._stored.write(stored, batch)
        )

    async def commit(self) -> None:
        await self._connection.call("commit", self._commit)

    async def _commit(self) -> None:
        await self._stored.commit()
        self._connection.network.event("committed")
        self._on_commit()


class SimulatedStore(CheckpointStore):
    """A checkpoint store, as one run of the job sees it: calls may be late or fail, and the store may be full."""

    def __init__(self, stored: CheckpointStore, connection: NetworkConnection) -> None:
        self._stored = stored
        self._connection = connection

    claim = by_network("claim the store", CheckpointStore.claim)
    pointer = by_network("ask the store for its pointer", CheckpointStore.pointer)
    commit = by_network("set the pointer of the store", CheckpointStore.commit)
    prune = by_network("prune the store", CheckpointStore.prune)
    list = by_network("list the store", CheckpointStore.list)
    open = by_network("open a snapshot", CheckpointStore.open)
    close = by_network("close the store", CheckpointStore.close, fails=False)
    follow = by_network("look for the claim of process 0", CheckpointStore.follow)

    async def save(
        self, header: SnapshotHeader, parts: Iterable[SnapshotPart], others: OtherFiles | None = None
    ) -> int:
        return await self._saved(header, lambda: self._stored.save(header, parts, others))

    async def save_parts(self, header: SnapshotHeader, parts: Iterable[SnapshotPart], process: int) -> PartsFile:
        return await self._saved(header, lambda: self._stored.save_parts(header, parts, process))

    async def _saved(self, header: SnapshotHeader, save: Callable[[], Awaitable[T]]) -> T:
        network = self._connection.network
        await self._connection.on_the_way("save a snapshot")
        if network.draws(network.levels.storage_full):
            network.event(f"no room for snapshot {header.id.number}")
            raise SimulatedStorageFull("the store is full (simulated)")
        saved = await save()
        network.event(f"saved snapshot {header.id.number}")
        await self._connection.on_the_way_back("save a snapshot")
        return saved
