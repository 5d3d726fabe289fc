"""Each operator here has one fault that the check must find; a fresh process imports them from this module."""

import time
from typing import Any, ClassVar

import numpy as np

from streamiter import IterationListener, Operator
from streamiter.operators import Context, Output
from streamiter.operators.source import Positions, Source, SourceBatch


class Momentum(Operator):
    """Has no fault: its state has two values."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.momentum = 0.0

    def process(self, record: float, out: Output) -> None:
        self.momentum = 0.9 * self.momentum + record
        self.weight -= 0.1 * self.momentum
        out.emit(self.weight)

    def snapshot(self) -> Any:
        return {"weight": self.weight, "momentum": self.momentum}

    def restore(self, state: Any) -> None:
        self.weight, self.momentum = state["weight"], state["momentum"]


class ForgetsASlot(Momentum):
    """Continues to train without its momentum."""

    def snapshot(self) -> Any:
        return {"weight": self.weight}

    def restore(self, state: Any) -> None:
        self.weight = state["weight"]


class RoundsItsState(Momentum):
    """Stores its state in float32, so the restored state is close but not equal."""

    def snapshot(self) -> Any:
        return {"weight": float(np.float32(self.weight)), "momentum": self.momentum}


class Gathers(Operator):
    """Has no fault: its state is a list of all records so far."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def process(self, record: Any, out: Output) -> None:
        self.seen.append(record)
        out.emit(len(self.seen))

    def snapshot(self) -> Any:
        return list(self.seen)

    def restore(self, state: Any) -> None:
        self.seen = list(state)


class SharesItsState(Gathers):
    """Returns a list as its state, and appends to that list later."""

    def snapshot(self) -> Any:
        return self.seen


class UsesTheGivenState(Gathers):
    """Continues to use the list of the restored snapshot."""

    def restore(self, state: Any) -> None:
        self.seen = state


class EmptiesOnSnapshot(Gathers):
    """Empties its state when it returns the state."""

    def snapshot(self) -> Any:
        state, self.seen = self.seen, []
        return state


class CountsSnapshots(Gathers):
    """Changes its behaviour after a snapshot, without a change of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 1

    def process(self, record: Any, out: Output) -> None:
        self.seen.append(record)
        out.emit(len(self.seen) * self.step)

    def snapshot(self) -> Any:
        self.step = 2
        return list(self.seen)


class StampsItsState(Gathers):
    """Returns a different state in each snapshot."""

    def snapshot(self) -> Any:
        return [time.perf_counter_ns(), *self.seen]

    def restore(self, state: Any) -> None:
        self.seen = list(state[1:])


class UsesTheWallClock(Operator):
    """Emits the time of the machine."""

    def process(self, record: Any, out: Output) -> None:
        out.emit(time.time_ns())


class UsesMonotonicTime(Operator):
    """Stores a monotonic time, which starts again in each process."""

    def open(self, context: Context) -> None:
        self.context = context
        self.last_s = 0.0

    def process(self, record: Any, out: Output) -> None:
        now_s = self.context.clock.monotonic_s()
        out.emit(now_s - self.last_s)
        self.last_s = now_s

    def snapshot(self) -> Any:
        return self.last_s

    def restore(self, state: Any) -> None:
        self.last_s = state


class IteratesOverASet(Operator):
    """Stores a set in its order of iteration."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def process(self, record: str, out: Output) -> None:
        self.seen.add(record)
        out.emit(list(self.seen))

    def snapshot(self) -> Any:
        return list(self.seen)

    def restore(self, state: Any) -> None:
        self.seen = set(state)


class UsesHash(Operator):
    """Counts by the hash of a word, which differs between processes."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def process(self, record: str, out: Output) -> None:
        bucket = hash(record) % 1009
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        out.emit((record, self.counts[bucket]))

    def snapshot(self) -> Any:
        return dict(self.counts)

    def restore(self, state: Any) -> None:
        self.counts = dict(state)


class KeepsASet(IteratesOverASet):
    """Returns a set, which is not plain data."""

    def snapshot(self) -> Any:
        return self.seen


class CountsInItsClass(Operator):
    """Counts in a class attribute, which starts again in a new process."""

    counts: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.own = 0

    def open(self, context: Context) -> None:
        self.counts[0] = 0

    def process(self, record: Any, out: Output) -> None:
        self.counts[0] += 1
        out.emit(self.counts[0])


class FailsToRestore(Gathers):
    """Expects a state of another form than it returns."""

    def restore(self, state: Any) -> None:
        self.seen = state["seen"]


class ForgetsItsEpoch(Operator, IterationListener):
    """Emits a sum for each epoch, and does not store the current sum."""

    def __init__(self) -> None:
        self.total = 0

    def process(self, record: int, out: Output) -> None:
        self.total += record

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        out.emit((epoch_watermark, self.total))
        self.total = 0


class IgnoresItsPositions(Source):
    """Ignores its stored positions."""

    def open(self, context: Context, positions: Positions | None) -> None:
        self.brought = 0

    def read(self) -> SourceBatch | None:
        self.brought += 1
        return None if self.brought > 3 else SourceBatch([self.brought], {"brought": self.brought})


class ResumesAtItsPositions(IgnoresItsPositions):
    """Has no fault: it resumes at its stored positions."""

    def open(self, context: Context, positions: Positions | None) -> None:
        self.brought = (positions or {}).get("brought", 0)
