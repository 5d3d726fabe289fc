"""One record for every n records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.operators.bounded import HeldInput
from streamiter.operators.operator import Context, IterationListener, Operator, Sharing
from streamiter.operators.output import Output
from streamiter.records import Batch, Columns, slice_batch

__all__ = ["MiniBatch"]

Epoch = int | None

# A timer counts as due this much early: rounding in the sum of a time and a delay must not put it off.
_ROUNDING_S: Final = 1e-6


class MiniBatch(Operator, IterationListener):
    """Emits one record for every ``n`` records: a list, an array or ``Columns`` of exactly n, in order.

    Records of different epochs never meet in one mini-batch. What is left over (fewer than n records) is
    state; it goes out at the end of its epoch, at the end of the input, or ``timeout_s`` after its first
    record arrived, unless the iteration is then still in an earlier epoch.

    Records of n that came as arrays (or ``Columns``) of one type stay one, a slice without a copy where
    a transport batch held them all; otherwise they become a list.

    >>> from streamiter.operators import MiniBatch, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> step = MiniBatch(2)
    >>> step.process_batch([1, 2, 3, 4, 5], out)
    >>> results
    [[1, 2], [3, 4]]
    >>> step.finish(out)
    >>> out.flush()
    >>> results
    [[1, 2], [3, 4], [5]]
    """

    needs_epochs = False

    def __init__(self, n: int, timeout_s: float | None = None) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigurationError(f"MiniBatch(n): expected a whole number above 0, given {n!r}")
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigurationError(
                "MiniBatch(timeout_s): expected seconds above 0, or None to wait for ever, "
                f"given {timeout_s!r}"
            )
        self._n = n
        self._left_over: dict[Epoch, HeldInput] = {}
        self._timeouts = None if timeout_s is None else _Timeouts(timeout_s)
        self._context: Context | None = None

    def open(self, context: Context) -> None:
        self._context = context
        if self._timeouts is not None:
            self._timeouts.open(context)

    def process_batch(self, batch: Batch, out: Output) -> None:
        epoch = None if self._context is None else self._context.epoch
        if not isinstance(batch, (list, np.ndarray, Columns)):
            batch = list(batch)
        held = self._left_over.setdefault(epoch, HeldInput())
        if held and len(held) + len(batch) < self._n:
            held.add(batch)
            return
        mini_batches, rest = _cut(held, batch, self._n)
        out.emit_batch(mini_batches)
        self._hold(epoch, held, rest)

    def _hold(self, epoch: Epoch, held: HeldInput, rest: Batch) -> None:
        if not len(rest):
            del self._left_over[epoch]
            return
        held.add(rest)
        if self._timeouts is not None:
            self._timeouts.begin(epoch)

    def on_epoch_watermark_incremented(
        self,
        epoch_watermark: int,
        context: Context,
        out: Output,
    ) -> None:
        ended = [epoch for epoch in self._left_over if epoch is not None and epoch <= epoch_watermark]
        for epoch in sorted(ended):
            self._emit_left_over(epoch, out)

    def on_timer(self, payload: Any, out: Output) -> None:
        epoch: Epoch = payload
        waiting = epoch in self._left_over
        if self._timeouts is not None and self._timeouts.are_due(epoch, waiting=waiting):
            self._emit_left_over(epoch, out)

    def finish(self, out: Output) -> None:
        for epoch in sorted(self._left_over, key=lambda epoch: -1 if epoch is None else epoch):
            self._emit_left_over(epoch, out)

    def _emit_left_over(self, epoch: Epoch, out: Output) -> None:
        mini_batches, rest = _cut(HeldInput(), self._left_over.pop(epoch).taken(), self._n)
        out.emit_batch([*mini_batches, rest] if len(rest) else mini_batches)

    def snapshot(self) -> dict[str, Any]:
        return {
            "left_over": [(epoch, held.snapshot()) for epoch, held in self._left_over.items()],
            "remaining_s": [] if self._timeouts is None else self._timeouts.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if self._timeouts is not None:
            self._timeouts.restore(state["remaining_s"])
        for epoch, batches in state["left_over"]:
            self._left_over[epoch] = HeldInput()
            self._left_over[epoch].restore(batches)
            if self._timeouts is not None:
                self._timeouts.begin_if_new(epoch)

    def share_out(self, states: Sequence[dict[str, Any]], sharing: Sharing) -> list[dict[str, Any]]:
        """What is left over goes to the new subtasks as its input would; its timeouts begin anew.

        It may be more than n of several old ones: then mini-batches go out with the next record.
        """
        epochs = dict.fromkeys(epoch for state in states for epoch, _ in state["left_over"])
        left_over: list[list[tuple[Epoch, list[Batch]]]] = [[] for _ in range(sharing.parallelism)]
        for epoch in epochs:
            kept = [dict(state["left_over"]).get(epoch, []) for state in states]
            for subtask, batches in enumerate(sharing.records("input", kept)):
                if batches:
                    left_over[subtask].append((epoch, batches))
        return [{"left_over": of_subtask, "remaining_s": []} for of_subtask in left_over]


def _cut(held: HeldInput, batch: Batch, n: int) -> tuple[list[Batch], Batch]:
    """The full mini-batches of what is held and a batch that fills it up, and what is left of the batch."""
    mini_batches: list[Batch] = []
    start = 0
    if len(held) >= n:  # Of a step that had more subtasks, or another n.
        held.add(batch)
        batch = held.taken()
    elif held:
        start = n - len(held)
        held.add(slice_batch(batch, 0, start))
        mini_batches.append(held.taken())
    stop = len(batch) - (len(batch) - start) % n
    mini_batches += [slice_batch(batch, at, at + n) for at in range(start, stop, n)]
    return mini_batches, slice_batch(batch, stop, len(batch))


class _Timeouts:
    """When the left-over records of which epoch must go out.

    An epoch has one timer, or none. One that comes before its time, because the records that it was set
    for have gone out and others wait, is set again. Timers themselves are restored by the engine.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._context: Context | None = None
        self._deadlines_s: dict[Epoch, float] = {}

    def open(self, context: Context) -> None:
        self._context = context

    def begin(self, epoch: Epoch) -> None:
        """The first left-over record of ``epoch`` has arrived."""
        self.begin_if_new(epoch)
        self._deadlines_s[epoch] = self._opened.clock.monotonic_s() + self._timeout_s

    def begin_if_new(self, epoch: Epoch) -> None:
        """The same, unless the epoch has a timer (a step that was restored may have had no timeout before)."""
        if epoch not in self._deadlines_s:
            self._deadlines_s[epoch] = self._opened.clock.monotonic_s() + self._timeout_s
            self._opened.set_timer(self._timeout_s, epoch)

    def are_due(self, epoch: Epoch, *, waiting: bool) -> bool:
        """Whether records that wait must go out, now that the timer of their epoch has come."""
        if epoch not in self._deadlines_s:
            return False
        remaining_s = self._deadlines_s[epoch] - self._opened.clock.monotonic_s()
        if waiting and remaining_s > _ROUNDING_S:
            self._opened.set_timer(remaining_s, epoch)
            return False
        if waiting and epoch != self._opened.epoch:
            # Another epoch's turn: what went out now would be counted to that one.
            self._opened.set_timer(self._timeout_s, epoch)
            return False
        del self._deadlines_s[epoch]
        return waiting

    @property
    def _opened(self) -> Context:
        assert self._context is not None
        return self._context

    def snapshot(self) -> list[tuple[Epoch, float]]:
        now_s = self._opened.clock.monotonic_s()
        return [(epoch, deadline_s - now_s) for epoch, deadline_s in self._deadlines_s.items()]

    def restore(self, state: list[tuple[Epoch, float]]) -> None:
        now_s = self._opened.clock.monotonic_s()
        self._deadlines_s = {epoch: now_s + remaining_s for epoch, remaining_s in state}
