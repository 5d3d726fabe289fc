"""What the operators of a flow are asked for and given, and whether it changes afterwards."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import Deferred
from streamiter.errors import PlainDataError
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.runtime.graph import Step
from streamiter.testing.restore.attributes import attributes_of
from streamiter.testing.restore.differences import first_difference

__all__ = ["Watch"]


@dataclass(frozen=True, slots=True)
class _Note:
    """A state as it was when it was given or taken."""

    kind: type[Operator]
    who: str
    state: Any
    content: bytes
    records: int


class Watch:
    """Stands between the engine and the operators of one run; they do not notice.

    Used in the event loop of that run only.
    """

    def __init__(self, plain_data: PlainData) -> None:
        self.violations: list[str] = []
        """What was found wrong so far, as sentences."""
        self.records = 0
        """Records that were read so far, for the sentences; written by whoever drives the run."""
        self.operators: dict[tuple[str, int], Operator] = {}
        """The operators at work by step and subtask, the last one where each round has its own."""
        self._plain = plain_data
        self._taken: list[_Note] = []
        self._given: list[_Note] = []
        self._deferring: set[type[Operator]] = set()
        """Those whose state is deferred: they may keep what they are given, which is decoded anew each time."""
        self._asked: dict[Operator, bytes] = {}
        """What an operator gave since the last record."""

    def step(self, step: Step) -> None:
        """Watch the operators of a step."""
        make = step.factory
        step.factory = lambda: self._watched(step.name, make())

    def next_records(self, records: int) -> None:
        """Records have been read since."""
        self.records += records
        self._asked.clear()

    def check_unchanged(self) -> None:
        """Look at all states that were given and taken: they must be as they were."""
        for note in self._taken:
            if changed := self._change_of(note):
                self.violations.append(
                    f"the state that snapshot() of {note.who} gave after record {note.records} changed afterwards: "
                    f"{changed}; give copies of what the operator goes on changing"
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
        """What the operators give when all is over, by step and subtask."""
        states: dict[str, bytes] = {}
        for (step, subtask), operator in sorted(self.operators.items()):
            state = type(operator).snapshot(operator)
            state = (await state) if inspect.isawaitable(state) else state
            if _has_deferred(state):
                self._deferring.add(type(operator))
            content, deferred = self._plain.encode_state(state, name=f"state of step {step!r}")
            frames = [frame for piece in deferred for frame in _frames_of(piece)]
            states[f"{step}[{subtask}]"] = self._plain.encode((content, frames))
        return states

    def attributes(self) -> dict[str, dict[str, str]]:
        """The attributes of all operators now, by who they belong to."""
        return {
            f"{type(operator).__name__} of step {step!r}": attributes_of(operator, self._plain)
            for (step, _), operator in self.operators.items()
        }

    # -- between the engine and an operator ---------------------------------------------------------------

    def _watched(self, step: str, operator: Any) -> Any:
        if not isinstance(operator, Operator):
            return operator  # The engine says what is wrong with it.
        who = f"{type(operator).__name__} (step {step!r})"
        opened, snapshot, restore = operator.open, operator.snapshot, operator.restore

        def open_noted(context: Context) -> Any:
            self.operators[step, context.subtask_index] = operator
            return opened(context)

        def snapshot_noted() -> Any:
            state = snapshot()
            if inspect.isawaitable(state):
                return _then(state, lambda given: self._note_taken(who, operator, given))
            self._note_taken(who, operator, state)
            return state

        def restore_noted(state: Any) -> Any:
            with contextlib.suppress(
                PlainDataError
            ):  # What stands for deferred state can be gone through once.
                content = self._plain.encode(state)
                self._given.append(_Note(type(operator), who, state, content, self.records))
            return restore(state)

        # In the instance, whatever its class forbids: the engine looks there first.
        for name, method in (("open", open_noted), ("snapshot", snapshot_noted), ("restore", restore_noted)):
            object.__setattr__(operator, name, method)
        return operator

    def _note_taken(self, who: str, operator: Operator, state: Any) -> None:
        content = self._encoded(state, who)
        if content is None:
            self._deferring.add(type(operator))
            return
        before = self._asked.setdefault(operator, content)
        if before != content:
            difference = first_difference(self._plain.decode(before), self._plain.decode(content), "state")
            self.violations.append(
                f"snapshot() of {who}, called twice in a row after record {self.records}, gave different states: "
                f"{difference}; it must only look, and its result depend on nothing but the records"
            )
        self._taken.append(_Note(type(operator), who, state, content, self.records))

    def _encoded(self, state: Any, who: str) -> bytes | None:
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


async def _then(awaited: Any, note: Callable[[Any], None]) -> Any:
    state = await awaited
    note(state)
    return state


def _frames_of(deferred: Deferred) -> list[bytes]:
    try:
        return list(deferred.frames())
    finally:
        deferred.release()


def _has_deferred(state: Any) -> bool:
    if isinstance(state, dict):
        return any(map(_has_deferred, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_has_deferred, state))
    return isinstance(state, Deferred)
