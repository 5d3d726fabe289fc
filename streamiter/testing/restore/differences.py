"""The comparisons of runs: of states during a run, of attributes of operators, and of outputs.

A ``Watch`` stands between the engine and the operators of a run. It records the states that operators return and
receive, and reports a state that changes afterwards. ``first_difference`` finds the first place where two plain values
differ; the functions behind it put such places into sentences.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from streamiter.engine.graph.graph import Step
from streamiter.engine.tasks.task_barriers import held_in_memory
from streamiter.errors import PlainDataError, shortened
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.values.deferred import Deferred, PlainValue
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Columns, TimedBatch


class RestoreMismatch(AssertionError):
    """A restored run differs from the undisturbed run: the message says the difference, the cut, and what to do."""


class Watch:
    """Records the states that the operators of one run return and receive, and reports later changes.

    Used in the event loop of that run only. The operators do not notice it.
    """

    def __init__(self, plain_data: PlainData, *, compare_snapshots: bool = True) -> None:
        self.compare_snapshots = compare_snapshots
        self.violations: list[str] = []
        """What is wrong so far, as sentences."""
        self.records = 0
        """The count of records that were read so far, for the sentences."""
        self.operators: dict[tuple[str, int], Operator] = {}
        """The running operators by step and subtask; the last one of a step that has one for each round."""
        self._plain = plain_data
        self._taken: list[_Note] = []
        self._given: list[_Note] = []
        self._deferring: set[type[Operator]] = set()
        """Operators with a deferred state: they may keep the state that they receive, which is decoded each time."""
        self._asked: dict[Operator, bytes] = {}
        """The state of each operator that returned one since the last record."""

    def watched_step(self, step: Step) -> Step:
        """Return the step with watched operators."""
        return replace(step, factory=lambda: self._watched(step.name, step.factory()))

    def report(self, violation: str) -> None:
        """Add a sentence to the violations."""
        self.violations.append(violation)

    def next_records(self, records: int) -> None:
        """Count records that were read."""
        self.records += records
        self._asked.clear()

    def check_unchanged(self) -> None:
        """Report each state that has changed since it was returned or received."""
        for note in self._taken:
            if changed := self._change_of(note):
                self.violations.append(
                    f"the state that snapshot() of {note.who} gave after record {note.records} changed afterwards: "
                    f"{changed}; give copies of objects that the operator changes later"
                )
        for note in self._given:
            if note.kind not in self._deferring and (changed := self._change_of(note)):
                self.violations.append(
                    f"the state that restore() of {note.who} was given changed afterwards: {changed}; the operator "
                    "keeps a reference to it and changes it: take copies"
                )
        self._taken.clear()
        self._given.clear()

    async def final_states(self) -> dict[str, bytes]:
        """Return the states of the operators after the end, by step and subtask."""
        states: dict[str, bytes] = {}
        for (step, subtask), operator in sorted(self.operators.items()):
            state = type(operator).snapshot(operator)
            state = (await state) if inspect.isawaitable(state) else state
            if _has_deferred(state):
                self._deferring.add(type(operator))
            content, deferred = self._plain.encode_state(state, name=f"state of step {step!r}")
            frames = [frame for piece in deferred for frame in held_in_memory(piece)]
            states[f"{step}[{subtask}]"] = self._plain.encode((content, frames))
        return states

    def attributes(self) -> dict[str, dict[str, str]]:
        """Return the current attributes of all operators."""
        return {
            f"{type(operator).__name__} of step {step!r}": attributes_of(operator, self._plain)
            for (step, _), operator in self.operators.items()
        }

    # -- between the engine and an operator ---------------------------------------------------------------

    def _watched(self, step: str, operator: Any) -> Any:
        if not isinstance(operator, Operator):
            return operator  # The engine raises an error for it.
        who = f"{type(operator).__name__} (step {step!r})"
        opened, snapshot, restore = operator.open, operator.snapshot, operator.restore

        def open_noted(context: Context) -> Awaitable[None] | None:
            self.operators[step, context.subtask_index] = operator
            return opened(context)

        def snapshot_noted() -> PlainValue:
            state = snapshot()
            if inspect.isawaitable(state):
                return _then(state, lambda given: self._note_taken(who, operator, given))
            self._note_taken(who, operator, state)
            return state

        def restore_noted(state: PlainValue) -> Awaitable[None] | None:
            # The decoded frames of a deferred state can be read only once, so such a state is not recorded.
            with contextlib.suppress(PlainDataError):
                content = self._plain.encode(state)
                self._given.append(_Note(type(operator), who, state, content, self.records))
            return restore(state)

        # In the instance, even if its class forbids that: the engine looks there first.
        for name, method in (("open", open_noted), ("snapshot", snapshot_noted), ("restore", restore_noted)):
            object.__setattr__(operator, name, method)
        return operator

    def _note_taken(self, who: str, operator: Operator, state: object) -> None:
        content = self._encoded(state, who)
        if content is None:
            self._deferring.add(type(operator))
            return
        before = self._asked.setdefault(operator, content)
        if before != content and self.compare_snapshots:
            difference = first_difference(self._plain.decode(before), self._plain.decode(content), "state")
            self.violations.append(
                f"snapshot() of {who}, called twice in a row after record {self.records}, gave different states: "
                f"{difference}; it must only look, and its result must depend on the records only"
            )
        self._taken.append(_Note(type(operator), who, state, content, self.records))

    def _encoded(self, state: object, who: str) -> bytes | None:
        try:
            return self._plain.encode(state, name="state")
        except PlainDataError as error:
            if not _has_deferred(state):
                self.violations.append(f"snapshot() of {who} after record {self.records}: {error}")
            return None

    def _change_of(self, note: _Note) -> str | None:
        try:
            now = self._plain.encode(note.state)
        except PlainDataError as error:
            return str(error)
        if now == note.content:
            return None
        return str(first_difference(self._plain.decode(note.content), self._plain.decode(now), "state"))


@dataclass(frozen=True, slots=True)
class _Note:
    """A state, and its encoding at the time when an operator returned or received it."""

    kind: type[Operator]
    who: str
    """The operator in messages."""
    state: object
    content: bytes
    """The encoding at that time."""
    records: int
    """The count of records at that time."""


async def _then(awaited: PlainValue, note: Callable[[PlainValue], None]) -> PlainValue:
    state = await awaited
    note(state)
    return state


def _has_deferred(state: object) -> bool:
    if isinstance(state, dict):
        return any(map(_has_deferred, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_has_deferred, state))
    return isinstance(state, Deferred)


class Difference(NamedTuple):
    """The first place where two values differ."""

    path: str
    """The place, as a Python expression."""
    expected: str
    """The expected value there, in words."""
    given: str
    """The given value there, in words."""

    def __str__(self) -> str:
        return f"{self.path or 'the value'}: expected {self.expected}, given {self.given}"


def first_difference(expected: PlainValue, given: PlainValue, path: str = "") -> Difference | None:
    """Return the first place where two values differ in type, dtype, order or bits; None if they are the same.

    >>> str(first_difference({"n": 1, "w": [1.0, 0.0]}, {"n": 1, "w": [1.0, -0.0]}))
    "['w'][1]: expected 0.0, given -0.0"
    """
    if type(expected) is not type(given):
        return Difference(path, _typed(expected), _typed(given))
    if isinstance(expected, dict):
        return _of_dicts(expected, given, path)
    if isinstance(expected, (list, tuple)):
        return _of_sequences(expected, given, path)
    if isinstance(expected, np.ndarray):
        return _of_arrays(expected, given, path)
    if isinstance(expected, Columns):
        return _of_dicts(dict(expected.arrays), dict(given.arrays), path)
    if isinstance(expected, TimedBatch):
        wanted, found = ([batch.records, batch.times, batch.order] for batch in (expected, given))
        return _of_sequences(wanted, found, path)
    if isinstance(expected, msgspec.Struct):
        return _of_dicts(_fields(expected), _fields(given), path, "{path}.{key}")
    if isinstance(expected, (float, np.generic)):
        same = np.asarray(expected).tobytes() == np.asarray(given).tobytes()
        if same and np.asarray(expected).dtype == np.asarray(given).dtype:
            return None
        return Difference(path, *_told_apart(repr(expected), repr(given), expected, given))
    return None if expected == given else Difference(path, shortened(expected), shortened(given))


def _of_dicts(
    expected: dict[PlainValue, PlainValue],
    given: dict[PlainValue, PlainValue],
    path: str,
    step: str = "{path}[{key!r}]",
) -> Difference | None:
    for key, value in expected.items():
        if key not in given:
            return Difference(step.format(path=path, key=key), shortened(value), "nothing")
        if difference := first_difference(value, given[key], step.format(path=path, key=key)):
            return difference
    for key, value in given.items():
        if key not in expected:
            return Difference(step.format(path=path, key=key), "nothing", shortened(value))
    if list(expected) != list(given):
        return Difference(path, f"keys in the order {list(expected)!r:.200}", f"{list(given)!r:.200}")
    # Equal keys may have different types (1 and 1.0).
    return _of_sequences(list(expected), list(given), f"{path}'s keys")


def _of_sequences(expected: PlainValue, given: PlainValue, path: str) -> Difference | None:
    for index, (one, other) in enumerate(zip(expected, given, strict=False)):
        if difference := first_difference(one, other, f"{path}[{index}]"):
            return difference
    if len(expected) == len(given):
        return None
    at = min(len(expected), len(given))
    what = [shortened(values[at]) if len(values) > at else "nothing" for values in (expected, given)]
    return Difference(f"{path}[{at}]", *what)


def _of_arrays(expected: PlainValue, given: PlainValue, path: str) -> Difference | None:
    if (expected.dtype, expected.shape) != (given.dtype, given.shape):
        return Difference(path, *(f"{array.dtype} of shape {array.shape}" for array in (expected, given)))
    if expected.tobytes() == given.tobytes():
        return None
    for index in np.ndindex(expected.shape):
        one, other = expected[index], given[index]
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            place = ", ".join(map(str, index))
            return Difference(f"{path}[{place}]", *_told_apart(repr(one), repr(other), one, other))
    return Difference(path, shortened(expected), shortened(given))


def _told_apart(one: str, other: str, expected: object, given: object) -> tuple[str, str]:
    """Return two texts that differ: NaNs with different payloads have the same repr."""
    if one != other:
        return one, other
    return (f"{one} (bytes {np.asarray(expected).tobytes().hex()})", f"bytes {np.asarray(given).tobytes().hex()}")


def _typed(value: object) -> str:
    return f"{type(value).__name__} {shortened(value)}"


def _fields(struct: msgspec.Struct) -> dict[PlainValue, PlainValue]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


# Deep enough for the optimizer of an operator's model; the engine's own objects are deeper.
_DEPTH_MAX: Final = 5
_NOT_STATE: Final = frozenset({"open", "snapshot", "restore"})
"""Attributes that a watch adds to an operator."""


def attributes_of(value: object, plain_data: PlainData) -> dict[str, str]:
    """Return the attributes of an object, and theirs, as texts by path, which can be compared across processes.

    >>> class Model:
    ...     def __init__(self):
    ...         self.weights, self.steps = [0.5], 3
    >>> attributes_of(Model(), PlainData())
    {'weights': '[0.5]', 'steps': '3'}
    """
    found: dict[str, str] = {}
    _collect(value, "", _DEPTH_MAX, plain_data, found)
    return found


def _collect(value: object, path: str, depth: int, plain_data: PlainData, found: dict[str, str]) -> None:
    if isinstance(value, (Context, Output, type)) or callable(value) or depth == 0:
        return
    if isinstance(value, random.Random):
        found[path] = f"random state {hash(value.getstate()):x}"
    elif isinstance(value, np.random.Generator):
        found[path] = shortened(value.bit_generator.state)
    elif isinstance(value, (set, frozenset)):
        found[path] = shortened(sorted(map(repr, value)))
    elif path and _is_plain(value, plain_data):
        found[path] = shortened(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}[{key!r}]", depth - 1, plain_data, found)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _collect(item, f"{path}[{index}]", depth - 1, plain_data, found)
    else:
        for name, item in _held_by(value).items():
            if path or name not in _NOT_STATE:
                _collect(item, f"{path}.{name}" if path else name, depth - 1, plain_data, found)


def _is_plain(value: object, plain_data: PlainData) -> bool:
    try:
        plain_data.encode(value)
    except PlainDataError:
        return False
    return True


def _held_by(value: object) -> dict[str, object]:
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                held[name] = getattr(value, name)
    return held


def stream_difference(
    expected: Mapping[str, Sequence[bytes]],
    given: Mapping[str, Sequence[bytes]],
    plain_data: PlainData,
    *,
    ordered: bool = True,
) -> str | None:
    """Return the first difference of the outputs of two runs; None if they are the same."""
    for name, wanted in expected.items():
        came = given.get(name, ())
        if not ordered:
            wanted, came = sorted(wanted), sorted(came)
        for number, (one, other) in enumerate(zip(wanted, came, strict=False), 1):
            if one != other:
                difference = first_difference(plain_data.decode(one), plain_data.decode(other), "record")
                return f"output {name!r}, record {number} of {len(wanted)}: {difference}"
        if len(wanted) != len(came):
            more = wanted[len(came) :] or came[len(wanted) :]
            kind = "missing" if len(came) < len(wanted) else "too many"
            return (
                f"output {name!r}: expected {len(wanted)} records, given {len(came)}; {kind}: "
                f"{plain_data.decode(more[0])!r:.200}"
            )
    return None


def state_difference(expected: bytes | None, given: bytes | None, plain_data: PlainData) -> str | None:
    """Return the first difference of two encoded states; None if they are the same."""
    if expected == given:
        return None
    if expected is None or given is None:
        return f"a state at the end: expected {expected is not None}, given {given is not None}"
    difference = first_difference(plain_data.decode(expected), plain_data.decode(given), "snapshot")
    return f"the state before the end: {difference}"


def lost_attributes(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence for each attribute that differs between the cut and the restored operator."""
    lost: list[str] = []
    for who, attributes in before.items():
        restored = after.get(who, {})
        for path, value in attributes.items():
            there = restored.get(path, "nothing")
            if there != value:
                lost.append(f"attribute {path!r} of {who} was {value} at the cut and is {there} after restore()")
    return lost
