"""The operators that hold records back before they emit: mini-batches, and the results of bounded streams.

`MiniBatch` waits for n records. `ReduceAll`, `Sort` and `Join` emit when their input ends. `HeldInput` keeps the
records that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError, shortened
from streamiter.operators.declared_state import JOINED, NESTED, DeclaredOperator, Form, declared
from streamiter.operators.definitions import Definition, function_in_words
from streamiter.operators.functions import apply_to_each, fail_at, field_or_function, plain_function, records_of, refuse
from streamiter.operators.keyed import NO_STATE
from streamiter.operators.keyed_state import independent_copy
from streamiter.operators.operator import Context, IterationListener, Sharing
from streamiter.operators.output import Output
from streamiter.values.helpers.clock import is_due
from streamiter.values.records import BATCH_RECORDS, Batch, Columns, TimedBatch, one_batch, slice_batch, take, untimed
from streamiter.values.times import MAX_TIME, MIN_TIME, Seconds, in_seconds

Epoch = int | None


class MiniBatch(DeclaredOperator, IterationListener):
    """Emits one record for every ``n`` records: a list, an array or ``Columns`` of exactly n, in order.

    A mini-batch never holds records of different epochs. The left-over records (fewer than n) are state. They are
    emitted at the end of their epoch, at the end of the input, or ``timeout_s`` after the first of them arrived,
    unless the iteration is still in an earlier epoch then.

    If all records of a mini-batch arrived in arrays, or ``Columns``, of one type, the mini-batch has that type: a slice
    without a copy where one transport batch held all of them. Otherwise it is a list.

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
    takes_timed_batches = True

    _left_over: dict[Epoch, HeldInput] = declared(
        made=dict,
        form=Form(
            lambda left_over: {epoch: held.state() for epoch, held in left_over.items()},
            lambda batches: {epoch: HeldInput.of(given) for epoch, given in batches.items()},
        ),
    )
    _timeouts: _Timeouts | None = declared(form=NESTED)

    def __init__(self, n: int, timeout_s: Seconds | None = None) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigurationError(f"MiniBatch(n): expected a whole number above 0, given {n!r}")
        timeout_s = in_seconds(timeout_s)
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigurationError(
                f"MiniBatch(timeout_s): expected seconds above 0, or None to wait for ever, given {timeout_s!r}"
            )
        self._n = n
        self._timeouts = None if timeout_s is None else _Timeouts(timeout_s)
        self._context: Context | None = None

    def open(self, context: Context) -> None:
        self._context = context
        if self._timeouts is not None:
            self._timeouts.open(context)

    def process_batch(self, batch: Batch, out: Output) -> None:
        epoch = None if self._context is None else self._context.epoch
        if not isinstance(batch, (list, np.ndarray, Columns, TimedBatch)):
            batch = list(batch)
        held = self._left_over.setdefault(epoch, HeldInput())
        if held and len(held) + len(batch) < self._n:
            held.add(batch)
            return
        mini_batches, rest = _cut(held, batch, self._n)
        out.emit_batch(_records_of(mini_batches))
        self._hold(epoch, held, rest)

    def _hold(self, epoch: Epoch, held: HeldInput, rest: Batch) -> None:
        if not len(rest):
            del self._left_over[epoch]
            return
        held.add(rest)
        if self._timeouts is not None:
            self._timeouts.begin(epoch)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
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
        out.emit_batch(_records_of([*mini_batches, rest] if len(rest) else mini_batches))

    def on_event_time_watermark(self, watermark: int, out: Output) -> int:
        """Hold the watermark back to the least timestamp of the left-over records; at the end, emit them before it."""
        epoch = None if self._context is None else self._context.epoch
        if watermark == MAX_TIME and epoch in self._left_over:
            self._emit_left_over(epoch, out)
        return min([watermark, *(held.least_time for held in self._left_over.values())])

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self._timeouts is not None:
            for epoch in self._left_over:
                self._timeouts.begin_if_new(epoch)

    def share_out(self, states: Sequence[dict[str, Any]], sharing: Sharing) -> list[dict[str, Any]]:
        """Send left-over records to the new subtasks as the step's edge would; their timeouts are reset.

        A new subtask may get more than n records from several old ones: it emits mini-batches with the next record.
        """
        epochs = dict.fromkeys(epoch for state in states for epoch in state["left over"])
        left_over: list[dict[Epoch, list[Batch]]] = [{} for _ in range(sharing.parallelism)]
        for epoch in epochs:
            kept = [state["left over"].get(epoch, []) for state in states]
            for subtask, batches in enumerate(sharing.records("input", kept)):
                if batches:
                    left_over[subtask][epoch] = batches
        return [{"left over": of_subtask, "timeouts": {}} for of_subtask in left_over]


def _records_of(mini_batches: list[Batch]) -> Batch:
    """Return mini-batches as records; each has the greatest timestamp of its own records."""
    if not any(isinstance(each, TimedBatch) for each in mini_batches):
        return mini_batches
    greatest = [each.times.max() if isinstance(each, TimedBatch) else MIN_TIME for each in mini_batches]
    return TimedBatch([untimed(each) for each in mini_batches], np.array(greatest, np.int64))


def _cut(held: HeldInput, batch: Batch, n: int) -> tuple[list[Batch], Batch]:
    """Return the full mini-batches of the held records and a batch, and the rest of the batch."""
    mini_batches: list[Batch] = []
    start = 0
    if len(held) >= n:  # restored from a step that had more subtasks, or another n
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
    """The times at which the left-over records of each epoch must be emitted.

    An epoch has one timer or none. A timer that fires early, because its records were emitted and later ones wait, is
    set again. The engine restores the timers themselves.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._context: Context
        """Set by ``open``."""
        self._deadlines_s: dict[Epoch, float] = {}

    def open(self, context: Context) -> None:
        self._context = context

    def begin(self, epoch: Epoch) -> None:
        """Start the timeout of ``epoch``, whose first left-over record has arrived."""
        self.begin_if_new(epoch)
        self._deadlines_s[epoch] = self._context.clock.monotonic_s() + self._timeout_s

    def begin_if_new(self, epoch: Epoch) -> None:
        """Start the timeout unless the epoch has a timer; the step may have had no timeout before a restore."""
        if epoch not in self._deadlines_s:
            self._deadlines_s[epoch] = self._context.clock.monotonic_s() + self._timeout_s
            self._context.set_timer(self._timeout_s, epoch)

    def are_due(self, epoch: Epoch, *, waiting: bool) -> bool:
        """Return whether waiting records must be emitted, now that the timer of their epoch has fired."""
        if epoch not in self._deadlines_s:
            return False
        remaining_s = self._deadlines_s[epoch] - self._context.clock.monotonic_s()
        if waiting and not is_due(remaining_s):
            self._context.set_timer(remaining_s, epoch)
            return False
        if waiting and epoch != self._context.epoch:
            # Another epoch has its turn: records that are emitted now would count to that epoch.
            self._context.set_timer(self._timeout_s, epoch)
            return False
        del self._deadlines_s[epoch]
        return waiting

    def state(self) -> dict[Epoch, float]:
        """Return the seconds that are left, by epoch."""
        now_s = self._context.clock.monotonic_s()
        return {epoch: deadline_s - now_s for epoch, deadline_s in self._deadlines_s.items()}

    def restore(self, state: dict[Epoch, float]) -> None:
        now_s = self._context.clock.monotonic_s()
        self._deadlines_s = {epoch: now_s + remaining_s for epoch, remaining_s in state.items()}


class ReduceAll(DeclaredOperator):
    """Emits ``f(…f(f(first, second), third)…, last)`` at the end of the input, and nothing where there was no record.

    ``f`` must not change its arguments. A record for which it raises follows the step's policy.

    State: the value so far.

    >>> from streamiter.operators import Output, ReduceAll
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> largest = ReduceAll(max)
    >>> largest.process_batch([3, 9, 4], out)
    >>> largest.finish(out)
    >>> out.flush()
    >>> results
    [9]
    """

    _value: Any = declared(
        NO_STATE,
        form=Form(
            lambda value: [] if value is NO_STATE else [independent_copy(value)],
            lambda kept: independent_copy(kept[0]) if kept else NO_STATE,
        ),
    )

    def __init__(self, f: Callable[[Any, Any], Any]) -> None:
        self._f = plain_function("ReduceAll(f)", f)

    def definition(self) -> Definition:
        return {"kind": "reduce_all", "f": function_in_words(self._f)}

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, progress = records_of(batch)
        if self._value is NO_STATE:
            self._value = next(records, NO_STATE)
        if out.tolerates_rejections:
            for record in records:
                self._take_in(record, out)
            return
        try:
            self._value = reduce(self._f, records, self._value)
        except Exception as error:
            fail_at(batch, progress, error, out)

    def _take_in(self, record: Any, out: Output) -> None:
        try:
            self._value = self._f(self._value, record)
        except Exception as error:
            refuse(out, record, error)

    def finish(self, out: Output) -> None:
        if self._value is not NO_STATE:
            out.emit(self._value)
        self._value = NO_STATE

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give the value of old subtask i to the new subtask i modulo ``parallelism``, which reduces its values."""
        values = JOINED("value", [state["value"] for state in states], parallelism)
        return [{"value": [reduce(self._f, given)] if given else []} for given in values]


class Sort(DeclaredOperator):
    """Emits all records in ascending order of ``key(record)``, at the end of the input.

    ``key`` is a function or the name of a field; without it the records themselves are compared. Records with equal
    keys keep their order, also with ``reverse``. Arrays, or ``Columns``, of one type stay arrays or ``Columns``. A
    record for which ``key`` raises follows the step's policy.

    State: all records, in memory.

    >>> from streamiter.operators import Output, Sort
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> by_length = Sort(len)
    >>> by_length.process_batch(["not", "to", "or", "be"], out)
    >>> by_length.finish(out)
    >>> results
    ['to', 'or', 'be', 'not']
    """

    _held: HeldInput = declared(made=lambda: HeldInput(), form=NESTED)

    def __init__(self, key: str | Callable[[Any], Any] | None = None, *, reverse: bool = False) -> None:
        self._key = None if key is None else field_or_function("Sort(key)", key)
        self._reverse = reverse

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._held.add(batch)

    def finish(self, out: Output) -> None:
        records = self._held.taken()
        if self._key is None:
            keys = list(records)
        else:
            records, keys = apply_to_each(self._key, records, out)
        order = sorted(range(len(keys)), key=keys.__getitem__, reverse=self._reverse)
        for start in range(0, len(order), BATCH_RECORDS):
            out.emit_batch(take(records, order[start : start + BATCH_RECORDS]))

    def share_out(self, states: Sequence[dict[str, Any]], sharing: Sharing) -> list[dict[str, Any]]:
        """Send the records to the new subtasks as the step's edge would."""
        return [{"held": held} for held in sharing.records("input", [state["held"] for state in states])]


FieldOrFunction = str | Callable[[Any], Any]


class Join(DeclaredOperator):
    """Emits the pair (left, right) of every two records with equal keys, at the end of the input.

    ``on`` is the name of a field, a function of the record, or a pair of these, for left and right. The pairs are in
    the order of the left records, then of the right ones. Keys are compared with ``==``: None equals None, NaN equals
    no key. A record for which ``on`` raises, or returns a key that cannot be hashed, follows the step's policy.

    Inputs: ``left`` and ``right``. State: all records, in memory.

    >>> from streamiter.operators import Join, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> join = Join(on=("user", "id"))
    >>> join.process_left_batch([{"user": 7, "page": "/"}, {"user": 8, "page": "/"}], out)
    >>> join.process_right_batch([{"id": 7, "name": "ann"}], out)
    >>> join.finish(out)
    >>> out.flush()
    >>> results
    [({'user': 7, 'page': '/'}, {'id': 7, 'name': 'ann'})]
    """

    _left: HeldInput = declared(made=lambda: HeldInput(), form=NESTED)
    _right: HeldInput = declared(made=lambda: HeldInput(), form=NESTED)

    def __init__(self, on: FieldOrFunction | tuple[FieldOrFunction, FieldOrFunction]) -> None:
        if isinstance(on, tuple) and len(on) != 2:
            raise ConfigurationError(
                "Join(on): expected a field's name, a function, or a pair of these for left and right, "
                f"given {shortened(on)}"
            )
        left_on, right_on = on if isinstance(on, tuple) else (on, on)
        self._left_key = _hashable(field_or_function("Join(on)", left_on))
        self._right_key = _hashable(field_or_function("Join(on)", right_on))

    def process_left_batch(self, batch: Batch, out: Output) -> None:
        self._left.add(batch)

    def process_right_batch(self, batch: Batch, out: Output) -> None:
        self._right.add(batch)

    def finish(self, out: Output) -> None:
        right_by_key: dict[Any, list[Any]] = {}
        for key, right in _keyed(self._right, self._right_key, out):
            if key == key:  # excludes NaN: a dict finds the same NaN object again
                right_by_key.setdefault(key, []).append(right)
        for key, left in _keyed(self._left, self._left_key, out):
            for right in right_by_key.get(key, ()):
                out.emit((left, right))

    def share_out(self, states: Sequence[dict[str, list[Batch]]], sharing: Sharing) -> list[dict[str, list[Batch]]]:
        """Send the records to the new subtasks as the step's edges would."""
        left, right = (sharing.records(name, [state[name] for state in states]) for name in ("left", "right"))
        return [{"left": of_left, "right": of_right} for of_left, of_right in zip(left, right, strict=True)]


def _hashable(key_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def hashable_key(record: Any) -> Any:
        key = key_of(record)
        hash(key)
        return key

    return hashable_key


def _keyed(held: HeldInput, key_of: Callable[[Any], Any], out: Output) -> zip[tuple[Any, Any]]:
    records, keys = apply_to_each(key_of, held.taken(), out)
    return zip(keys, records, strict=True)


class HeldInput:
    """Records that are set aside, in order. Arrays and ``Columns`` are kept as they arrived, without copies.

    >>> held = HeldInput()
    >>> held.add([1, 2]), held.add([3])
    (None, None)
    >>> len(held), held.merged()
    (3, [1, 2, 3])
    """

    def __init__(self) -> None:
        self._pieces: list[Batch] = []
        self._length = 0
        self.least_time = MAX_TIME
        """The least timestamp of the records; ``MAX_TIME`` if none has one."""

    def __len__(self) -> int:
        return self._length

    def add(self, batch: Batch) -> None:
        """Append the records of a batch."""
        self._length += len(batch)
        if isinstance(batch, TimedBatch):
            known = batch.times[batch.times != MIN_TIME]
            self.least_time = min(self.least_time, int(known.min(initial=MAX_TIME)))
        if isinstance(batch, (np.ndarray, Columns, TimedBatch)):
            self._pieces.append(batch)
        elif self._pieces and isinstance(self._pieces[-1], list):
            self._pieces[-1].extend(batch)
        else:
            self._pieces.append(list(batch))

    def merged(self) -> Batch:
        """Return all records as one batch: a list, unless all arrived as arrays, or ``Columns``, of one type."""
        return one_batch(self._pieces) if self._pieces else []

    def taken(self) -> Batch:
        """Remove all records, and return them as one batch."""
        merged = self.merged()
        self._pieces, self._length, self.least_time = [], 0, MAX_TIME
        return merged

    def state(self) -> list[Batch]:
        """Return the records as plain data."""
        return [list(piece) if isinstance(piece, list) else piece for piece in self._pieces]

    @classmethod
    def of(cls, state: list[Batch]) -> HeldInput:
        """Return the input of a :meth:`state`."""
        held = cls()
        held.restore(state)
        return held

    def restore(self, state: list[Batch]) -> None:
        """Take over the records that ``state`` returned."""
        for batch in state:
            self.add(batch)
