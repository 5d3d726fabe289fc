"""What the operators of a step keep, for another number of subtasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

from streamiter.checkpoints.keys import key_groups, normalize_key
from streamiter.errors import StreamiterError
from streamiter.operators.frozen_states import StateFrame, select_keys
from streamiter.operators.keyed import KeyedOperator
from streamiter.operators.operator import Operator
from streamiter.operators.sharing import Sharing
from streamiter.runtime.checkpointing.redistribution.old_job import OldJob
from streamiter.runtime.graph import Step
from streamiter.runtime.partitioning import subtask_of_group

__all__ = ["KeyShare", "shared_out", "timers_of"]

Timer = tuple[int, Any, Any]
"""When it is due in milliseconds, its key, its payload."""


@final
class KeyShare:
    """The states of the keys of one subtask, from those of all old ones; read anew whenever one goes through them."""

    def __init__(self, states: Sequence[Iterable[StateFrame]], subtask: int, subtasks: int) -> None:
        self._states = states
        self._subtask = subtask
        self._subtasks = subtasks

    def __iter__(self) -> Iterator[StateFrame]:
        for frames in self._states:
            yield from (frame for frame in select_keys(frames, self._owns) if frame[0])

    def _owns(self, keys: list[Any]) -> list[bool]:
        owners = subtask_of_group(key_groups(keys), self._subtasks)
        owned: list[bool] = (owners == self._subtask).tolist()
        return owned


def shared_out(
    old: OldJob, step: Step, operator: Operator, states: Sequence[dict[str, Any]], sharing: Sharing
) -> list[dict[str, Any]]:
    """The states of the new instances from those of the old ones; ``operator`` is a new one, not open."""
    subtasks = range(step.parallelism)
    operators = _of_operators(old, step, operator, [state["operator"] for state in states], sharing)
    keyed = [state["keyed"] for state in states if state["keyed"] is not None]
    is_keyed = step.keys is not None
    timers = timers_of([state["timers"] for state in states], step.parallelism, by_key=is_keyed)
    takes_timers = any(state["takes timers"] for state in states)
    return [
        {
            "operator": operators[subtask],
            "keyed": KeyShare(keyed, subtask, len(subtasks)) if is_keyed else None,
            "timers": timers[subtask],
            "takes timers": takes_timers,
        }
        for subtask in subtasks
    ]


def timers_of(timers: Iterable[Iterable[Timer]], subtasks: int, *, by_key: bool) -> list[list[Timer]]:
    """A timer that was set for a key goes with it; the others are dealt out in turn.

    >>> timers_of([[(5, None, "a"), (6, None, "b")], [(7, None, "c")]], 2, by_key=False)
    [[(5, None, 'a'), (7, None, 'c')], [(6, None, 'b')]]
    """
    dealt: list[list[Timer]] = [[] for _ in range(subtasks)]
    turn = 0
    for timer in (timer for of_subtask in timers for timer in of_subtask):
        _, key, _ = timer
        if by_key and key is not None:
            [group] = key_groups([normalize_key(key)])
            dealt[subtask_of_group(int(group), subtasks)].append(timer)
        else:
            dealt[turn % subtasks].append(timer)
            turn += 1
    return dealt


def _of_operators(
    old: OldJob, step: Step, operator: Operator, states: list[Any], sharing: Sharing
) -> Sequence[Any]:
    count = step.parallelism
    if all(state is None for state in states):
        return [None] * count
    if isinstance(operator, KeyedOperator):
        return [KeyShare(states, subtask, count) for subtask in range(count)]
    share_out: Callable[..., Any] | None = getattr(operator, "share_out", None)
    given: Any = sharing
    if share_out is None:
        share_out, given = getattr(operator, "redistribute", None), count
    if share_out is None:
        raise old.refused(
            step.name,
            f"expected the parallelism {len(states)} that it had, given {count}; its state cannot be shared out anew: "
            f"keep parallelism={len(states)}, or define redistribute(states, parallelism) in "
            f"{type(operator).__name__}",
        )
    try:
        shared = share_out(states, given)
    except StreamiterError as error:
        raise old.refused(
            step.name,
            f"its {len(states)} subtasks cannot become {count}: {error}; keep parallelism={len(states)}, or take "
            "another checkpoint with it",
        ) from error
    return _checked(old, step, operator, shared)


def _checked(old: OldJob, step: Step, operator: Operator, shared: Any) -> Sequence[Any]:
    if (
        not isinstance(shared, Sequence)
        or isinstance(shared, (str, bytes))
        or len(shared) != step.parallelism
    ):
        given = f"{len(shared)} of them" if isinstance(shared, (list, tuple)) else type(shared).__name__
        raise old.refused(
            step.name,
            f"{type(operator).__name__}.redistribute: expected a list of {step.parallelism} states, one for each "
            f"subtask, given {given}",
        )
    return shared
