"""The harness drives one operator as the engine does, with cuts, epochs, timers and snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from streamiter.operators import DEAD_LETTERS, Context, JobScope, Operator, Output, Progress
from streamiter.operators.keyed_state import KeyedStates
from streamiter.operators.operator import OperatorStatistics
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, Columns


class ManualClock:
    """A clock that advances only when a test advances it."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        raise AssertionError("operators set timers by their context")

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("operators do not sleep")


class Driven:
    """An operator with an output, a context and timers; ``batches`` and ``records`` contain the emitted output."""

    def __init__(
        self,
        operator: Operator,
        *,
        policy: Any = "fail",
        in_iteration: bool = False,
        clock: ManualClock | None = None,
        subtask: int = 0,
        parallelism: int = 1,
        make_states: Callable[..., KeyedStates] | None = None,
    ) -> None:
        self.operator: Any = operator
        self.clock = clock or ManualClock()
        self.progress = Progress()
        self.timers: list[tuple[float, Any]] = []
        self.batches: list[Batch] = []
        self.epochs: list[int] = []
        self.dead_letters: list[Any] = []
        self.out = Output("the step", policy)
        self.out.connect(self._receive, None)
        self.out.connect(self.dead_letters.extend, DEAD_LETTERS)
        self.context = Context(
            name="the step",
            subtask_index=subtask,
            parallelism=parallelism,
            clock=self.clock,
            progress=self.progress,
            statistics=lambda: OperatorStatistics(0, 0, 0, 0),
            scope=JobScope(),
            post=lambda control: None,
            set_timer=lambda delay_s, key, payload: self.timers.append((self.clock.now_s + delay_s, payload)),
            in_iteration=in_iteration,
            keyed=None,
            encode=PlainData().encode,
            make_states=None if make_states is None else lambda: make_states(self.clock),
        )
        self.operator.open(self.context)

    def _receive(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.epochs += [self.progress.epoch] * len(batch)

    @property
    def records(self) -> list[Any]:
        return [record for batch in self.batches for record in batch]

    def feed(self, *batches: Batch, epoch: int = 0, to: str | None = None) -> Driven:
        handle = getattr(self.operator, "process_batch" if to is None else f"process_{to}_batch")
        for batch in batches:
            self.progress.epoch = epoch
            handle(batch, self.out)
            self.out.flush()
        return self

    def watermark(self, epoch: int) -> Driven:
        for ended in range(self.progress.watermark + 1, epoch + 1):
            self.progress.epoch = ended
            self.operator.on_epoch_watermark_incremented(ended, self.context, self.out)
            self.out.flush()
        self.progress.watermark = epoch
        return self

    def wait(self, seconds: float) -> Driven:
        """Advance the clock timer by timer; as in the engine, a timer is handled in the first open epoch."""
        until_s = self.clock.now_s + seconds
        while due := sorted(timer for timer in self.timers if timer[0] <= until_s):
            self.timers.remove(due[0])
            self.clock.now_s = max(self.clock.now_s, due[0][0])
            self.progress.epoch = self.progress.watermark + 1
            self.operator.on_timer(due[0][1], self.out)
            self.out.flush()
        self.clock.now_s = until_s
        return self

    def finish(self) -> Driven:
        self.operator.finish(self.out)
        self.out.flush()
        return self

    def restarted(self, operator: Operator, *, policy: Any = "fail", in_iteration: bool = False) -> Driven:
        """Return a new instance that resumes from this instance's encoded snapshot, with its timers."""
        state = stored(self.operator.snapshot())
        other = Driven(operator, policy=policy, in_iteration=in_iteration, clock=self.clock)
        other.operator.restore(state())
        other.timers += self.timers
        other.progress.watermark = self.progress.watermark
        return other


def stored(state: Any) -> Callable[[], Any]:
    """Encode a state with its deferred pieces; return a function that decodes it any number of times."""
    plain = PlainData()
    content, pieces = plain.encode_state(state)
    frames = [list(piece.frames()) for piece in pieces]
    return lambda: plain.decode_state(content, lambda number: list(map(plain.decode, frames[number])))


def frozen(value: Any) -> Any:
    """Return a value that equals another frozen value only if both have one type and are equal to the bit."""
    kind = type(value).__name__
    if isinstance(value, Columns):
        return kind, tuple((name, frozen(array)) for name, array in value.arrays.items())
    if isinstance(value, np.ndarray):
        return kind, str(value.dtype), value.shape, tuple(frozen(item) for item in value.ravel().tolist())
    if isinstance(value, (float, np.floating)):
        return kind, float(value).hex()
    if isinstance(value, dict):
        return kind, tuple((frozen(key), frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(frozen(item) for item in value)
    return kind, value


def pieces_of(batch: Batch, cuts: Sequence[int]) -> list[Batch]:
    """Return the batch in pieces, cut at these places."""
    places = sorted({0, len(batch), *(cut for cut in cuts if cut < len(batch))})
    return [batch[start:stop] for start, stop in pairwise(places)]


def cuts(longest: int = 60) -> st.SearchStrategy[list[int]]:
    """Return places to cut a batch."""
    return st.lists(st.integers(1, longest), max_size=12)


def as_kind(kind: str, numbers: list[int]) -> Batch:
    """Return the numbers as a list, an array or ``Columns`` with a second column."""
    if kind == "list":
        return list(numbers)
    array = np.array(numbers, dtype=np.int64)
    array.flags.writeable = False
    return array if kind == "array" else Columns({"x": array, "half": array / 2})


# Enough examples to find errors in these operators; no deadline, because the machine may be busy.
quick = settings(max_examples=8, deadline=None)
thorough = settings(max_examples=50, deadline=None)

KINDS = ("list", "array", "columns")


def number_in(record: Any) -> Any:
    """Return the number of a record that ``as_kind`` made."""
    return record["x"] if isinstance(record, dict) else record
