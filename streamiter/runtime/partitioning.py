"""Which subtask a record goes to. None depends on where transport batches are cut."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from streamiter.checkpoints.keys import KEY_GROUPS, key_groups
from streamiter.errors import ConfigurationError
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, slice_batch, take

__all__ = [
    "Broadcast",
    "ByFunction",
    "ByKey",
    "Forward",
    "Partitioning",
    "Rebalance",
    "Splitter",
    "Turns",
    "subtask_of_group",
]

Groups = TypeVar("Groups", int, npt.NDArray[np.int64])

Splitter = Callable[[Batch], Iterable[tuple[int, Batch]]]
"""Splits a batch into parts, each with the index of the subtask it goes to; keeps state between calls."""


class Partitioning(Protocol):
    """How an edge distributes records."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        """A new splitter for one upstream subtask."""


def subtask_of_group(group: Groups, subtasks: int) -> Groups:
    """The subtask that owns a key group, or each of an array of them."""
    return group * subtasks // KEY_GROUPS


@dataclass(frozen=True, slots=True)
class Forward:
    """Subtask i to subtask i."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        return lambda batch: ((subtask, batch),)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every record to every subtask."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        everyone = range(subtasks_downstream)
        return lambda batch: [(downstream, batch) for downstream in everyone]


class Turns:
    """The splitter that gives each subtask a record in turn. Whose turn it is, is state of the job."""

    __slots__ = ("_subtasks", "following")

    def __init__(self, following: int, subtasks: int) -> None:
        self.following = following
        """The subtask that the next record goes to."""
        self._subtasks = subtasks

    def __call__(self, batch: Batch) -> Iterable[tuple[int, Batch]]:
        first, length, subtasks = self.following, len(batch), self._subtasks
        self.following = (first + length) % subtasks
        return [((first + turn) % subtasks, batch[turn::subtasks]) for turn in range(min(length, subtasks))]


@dataclass(frozen=True, slots=True)
class Rebalance:
    """In turn, record by record; upstream subtask i begins with downstream subtask i."""

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        return Turns(subtask % subtasks_downstream, subtasks_downstream)


@dataclass(frozen=True, slots=True)
class ByKey:
    """All records of a key to one subtask. ``key_of`` takes a record, or with ``whole_batches`` a batch.

    With ``tolerant``, records without a good key go to the first subtask: the step there asks for their
    key again and refuses them by its policy.
    """

    key_of: Callable[[Any], Any]
    whole_batches: bool = False
    tolerant: bool = False

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        split = self._splitter(subtasks_downstream)
        return self._tolerant_splitter(split, subtasks_downstream) if self.tolerant else split

    def _tolerant_splitter(self, split: Splitter, subtasks_downstream: int) -> Splitter:
        def owner(record: Any) -> int:
            try:
                return subtask_of_group(int(key_groups([self.key_of(record)])[0]), subtasks_downstream)
            except Exception:
                return 0

        def split_tolerantly(batch: Batch) -> Iterable[tuple[int, Batch]]:
            try:
                return split(batch)
            except Exception:
                return _parts(batch, np.array([owner(record) for record in batch]), subtasks_downstream)

        return split_tolerantly

    def _splitter(self, subtasks_downstream: int) -> Splitter:
        key_of, whole_batches = self.key_of, self.whole_batches

        def split(batch: Batch) -> Iterable[tuple[int, Batch]]:
            keys = key_of(batch) if whole_batches else [key_of(record) for record in batch]
            if len(keys) != len(batch):
                raise ConfigurationError(
                    f"key_by_batch: expected the function to give a key for each of {len(batch)} records, "
                    f"given {len(keys)}; return an array as long as the batch"
                )
            return _parts(batch, subtask_of_group(key_groups(keys), subtasks_downstream), subtasks_downstream)

        return split


@dataclass(frozen=True, slots=True)
class ByFunction:
    """``function(record)`` modulo the number of subtasks."""

    function: Callable[[Any], int]

    def splitter(self, subtask: int, subtasks_downstream: int) -> Splitter:
        function = self.function

        def split(batch: Batch) -> Iterable[tuple[int, Batch]]:
            chosen = [_whole_number(function(record)) % subtasks_downstream for record in batch]
            return _parts(batch, np.array(chosen, np.int64), subtasks_downstream)

        return split


def _whole_number(chosen: Any) -> int:
    try:
        return operator.index(chosen)
    except TypeError:
        raise ConfigurationError(
            f"partition_by: expected the function to give a whole number, given {shortened(chosen)}; "
            "use int(…), or key_by for keys of other types"
        ) from None


def _parts(batch: Batch, owners: np.ndarray[Any, Any], subtasks: int) -> Iterable[tuple[int, Batch]]:
    parts = []
    for subtask in range(subtasks):
        indices = np.flatnonzero(owners == subtask)
        if len(indices) == len(batch) > 0:
            parts.append((subtask, slice_batch(batch, 0, len(batch))))
        elif len(indices):
            parts.append((subtask, take(batch, indices.tolist() if isinstance(batch, list) else indices)))
    return parts
