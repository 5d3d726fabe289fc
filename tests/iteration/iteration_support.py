"""Flows with loops under a schedule decided by a seed, and steps that record their calls."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from processes.linked_jobs import piped_jobs
from support.waiting import PATIENCE_S

from streamiter import Flow, IterationListener, Operator, Stream
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits, JobOptions
from streamiter.engine.tasks.watchdog import blocked_by
from streamiter.operators.operator import BoundaryOutput, Notice
from streamiter.operators.source import Source, SourceBatch

T = TypeVar("T")

SMALL = ChannelLimits(records=2)


async def called(notice: Notice, out: BoundaryOutput) -> None:
    """Call a notice as a task does."""
    if (result := notice(out)) is not None:
        await result


class ShuffledEventLoop(asyncio.SelectorEventLoop):
    """Runs ready callbacks in an order decided by a seed: a busy machine may choose any order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        super().__init__()

    def _run_once(self) -> None:
        ready = list(self._ready)  # type: ignore[attr-defined]
        self._random.shuffle(ready)
        self._ready.clear()  # type: ignore[attr-defined]
        self._ready.extend(ready)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_shuffled(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run ``main`` in a shuffled event loop."""
    with asyncio.Runner(loop_factory=lambda: ShuffledEventLoop(seed)) as runner:
        return runner.run(main)


async def ended(job: Job, *others: JobFollower, patience_s: float = PATIENCE_S) -> JobStatistics:
    """Wait for the end of the job, and of its other processes.

    If one does not end, raise an error that says what each task waits for.
    """
    jobs: list[Any] = [job, *others]
    try:
        return (await asyncio.wait_for(asyncio.gather(*(each.wait() for each in jobs)), patience_s))[0]
    except TimeoutError:
        reasons = map(blocked_by, [*job._tasks, *(task for each in others for task in each.tasks)])
        waiting = [reason for reason in reasons if reason] or ["nothing: no task has input"]
        tasks = [task for each in jobs for task in each.statistics().tasks]
        watermarks = {task.name: task.epoch_watermark for task in tasks if not task.ended}
        await job.stop("abort")
        raise AssertionError(f"the loop does not end; blocked: {waiting}; not ended: {watermarks}") from None


def run(
    flow: Flow, *, seed: int = 0, limits: ChannelLimits | None = None, processes: int | None = None, **options: Any
) -> JobStatistics:
    """Run a flow to its end under the schedule of ``seed``, which also decides whether in one process, two or three."""
    processes = 1 + seed % 3 if processes is None else processes

    async def main() -> JobStatistics:
        if processes == 1:
            return await ended(await flow.start(channel_limits=limits, **options))
        jobs = piped_jobs(flow, processes, seed, JobOptions(channel_limits=limits or ChannelLimits(), **options))
        await asyncio.gather(*(job.start() for job in jobs))
        return await ended(*jobs)

    return run_shuffled(main(), seed)


class CutItems(Source):
    """Gives item i to subtask i mod n, in batches cut at random, after pauses of random length."""

    def __init__(
        self, items: Sequence[Any], seed: int, *, at_end: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._items = items
        self._seed = seed
        self._at_end = at_end
        self._done = 0

    def open(self, context: Any, positions: Any) -> None:
        self._items = self._items[context.subtask_index :: context.parallelism]
        self._random = random.Random(self._seed * 1_000 + context.subtask_index)
        self._done = (positions or {}).get("done", 0)

    async def read(self) -> SourceBatch | None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        if self._done == len(self._items):
            if self._at_end is not None:
                await self._at_end()
            return None
        stop = min(len(self._items), self._done + self._random.randint(1, 5))
        batch = self._items[self._done : stop]
        self._done = stop
        return SourceBatch(list(batch), {"done": stop})


def cut_items(flow: Flow, items: Iterable[Any], *, seed: int = 0, parallelism: int = 1) -> Stream:
    """Return a bounded stream of items in batches of random length."""
    listed = list(items)
    return flow.from_source(lambda: CutItems(listed, seed), parallelism=parallelism)


class Endless:
    """A factory of sources that give some items and then wait forever."""

    bounded = False

    def __init__(self, items: Iterable[Any] = (), seed: int = 0) -> None:
        self._items = list(items)
        self._seed = seed

    def __call__(self) -> CutItems:
        async def never() -> None:
            await asyncio.get_running_loop().create_future()

        return CutItems(self._items, self._seed, at_end=never)


class Dawdle(Operator):
    """Passes records on in pieces of random length, with random pauses; the step has its own task."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def open(self, context: Any) -> None:
        self._random = random.Random(self._seed * 1_000 + context.subtask_index)

    async def process_batch(self, batch: Any, out: Any) -> None:
        start = 0
        while start < len(batch):
            stop = start + self._random.randint(1, 4)
            out.emit_batch(batch[start:stop])
            start = stop
            for _ in range(self._random.randrange(3)):
                await asyncio.sleep(0)


Log = dict[tuple[str, int], list[tuple[Any, ...]]]
"""The calls of all instances of steps, in order, by step name and subtask."""


class Witness(Operator, IterationListener):
    """Records all its calls; ``on_record`` and ``on_callback`` may emit."""

    def __init__(
        self,
        log: Log,
        *,
        on_record: Callable[[Any, Any, Any], object] | None = None,
        on_callback: Callable[[int, Any, Any], object] | None = None,
        on_terminated: Callable[[Any, Any], object] | None = None,
        on_finish: Callable[[Any], object] | None = None,
        on_ended: Callable[[str, Any], object] | None = None,
    ) -> None:
        self._logs = log
        self._on_record = on_record or (lambda record, context, out: out.emit(record))
        self._on_callback = on_callback
        self._on_terminated = on_terminated
        self._on_finish = on_finish
        self._on_ended = on_ended

    def open(self, context: Any) -> Any:
        self.context = context
        self._log = self._logs.setdefault((context.name, context.subtask_index), [])

    def process(self, record: Any, out: Any) -> Any:
        self._note("record", record)
        self._on_record(record, self.context, out)

    process_left = process_right = process_variable = process_data = process

    def input_ended(self, name: str, out: Any) -> Any:
        self._log.append(("input ended", name))
        if self._on_ended is not None:
            self._on_ended(name, out)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> Any:
        assert context.epoch == epoch_watermark
        self._log.append(("callback", epoch_watermark))
        if self._on_callback is not None:
            self._on_callback(epoch_watermark, context, out)

    def on_iteration_terminated(self, context: Any, out: Any) -> Any:
        assert context.is_ending
        self._log.append(("terminated", context.epoch))
        if self._on_terminated is not None:
            self._on_terminated(context, out)

    def finish(self, out: Any) -> Any:
        self._log.append(("finish",))
        if self._on_finish is not None:
            self._on_finish(out)

    def close(self) -> Any:
        self._log.append(("close",))

    def _note(self, kind: str, value: Any) -> None:
        self._log.append((kind, value, self.context.epoch))


class WithEpoch(Operator):
    """Emits each record with its epoch at this step."""

    def open(self, context: Any) -> None:
        self._context = context

    def process(self, record: Any, out: Any) -> None:
        out.emit((record, self._context.epoch))


def tagged(stream: Stream, **options: Any) -> Stream:
    return stream.process(WithEpoch, **options)


def with_coroutines(kind: type[T]) -> type[T]:
    """Return the operator class with coroutine functions as methods, which first yield to the event loop."""

    def gives_way(plain: Callable[..., None]) -> Callable[..., Coroutine[Any, Any, None]]:
        async def method(self: Any, *arguments: Any) -> None:
            await asyncio.sleep(0)
            plain(self, *arguments)

        return method

    methods = [
        "open",
        "process",
        "input_ended",
        "on_epoch_watermark_incremented",
        "on_iteration_terminated",
        "finish",
        "close",
    ]
    return type(f"Async{kind.__name__}", (kind,), {name: gives_way(getattr(kind, name)) for name in methods})


def kinds(log: Sequence[tuple[Any, ...]], *wanted: str) -> list[tuple[Any, ...]]:
    """Return the entries of these kinds."""
    return [entry for entry in log if entry[0] in wanted]


def callbacks(log: Sequence[tuple[Any, ...]]) -> list[int]:
    """Return the epochs of the callbacks in a log, in order."""
    return [entry[1] for entry in log if entry[0] == "callback"]


def check_listener(log: Sequence[tuple[Any, ...]], *, in_order: bool = False) -> None:
    """Check the rules for every listener, with any kind of input."""
    heard = callbacks(log)
    assert heard == list(range(len(heard))), heard
    kinds = [entry[0] for entry in log]
    assert kinds.count("terminated") == kinds.count("finish") == kinds.count("close") == 1
    assert kinds[-3:] == ["terminated", "finish", "close"], kinds[-5:]
    last_callback = max((at for at, kind in enumerate(kinds) if kind == "callback"), default=-1)
    watermark = -1
    for at, entry in enumerate(log):
        if entry[0] == "callback":
            watermark = entry[1]
        elif entry[0] == "record":
            assert entry[2] > watermark, f"{entry} after callback {watermark}"
            assert not in_order or at > last_callback or entry[2] == watermark + 1, f"{entry} out of turn"
    if in_order:
        epochs = [entry[2] for entry in log if entry[0] == "record"]
        assert epochs == sorted(epochs), epochs
