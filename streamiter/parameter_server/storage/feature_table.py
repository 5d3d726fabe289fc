"""A table of features: numbers by key, the more the more often a key occurs, that leave in the end.

``feature_steps`` describes the arrays, and which features leave when. Other compiled code calls its ``find_feature``
and ``touch_feature`` with pointers to ``FeatureTable.arrays``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, OtherModel
from streamiter.values.helpers.compiled import saying_that_it_compiles
from streamiter.values.numbers import Integers, check_memory, whole_number

# The numbers of entries have 32 bits, and the index has up to four times as many places as there are entries.
_CAPACITY_MAX: Final = 2**29

# Of an entry: its key, its count, its time, two neighbours, the numbers of its row and of its file.
_ENTRY_BYTES: Final = 8 + 4 + 8 + 2 * 4 + 4 + 4
_PLACE_BYTES: Final = 4
_PLACES_AT_FIRST: Final = 4
# A number with its sum of squares; and the place of a row among the free ones.
_PAIR_BYTES: Final = 8
_FREE_ROW_BYTES: Final = 4
# Some megabytes with two experts and 8 factors.
_FEATURES_OF_PART: Final = 1 << 15


class FeatureCounts(NamedTuple):
    """How many features a table has, and how many have left."""

    features: int
    """The features with an entry, of which ``admitted`` ones have a row."""
    admitted: int
    expired: int
    """The features that have left, or began anew, because they were expired."""
    evicted: int
    """The features that have left because there was no room."""


class FeatureTable:
    """Numbers by keys of 64 bits: ``weights`` of each feature, and a row of ``width`` numbers of each admitted one.

    Each number has a sum of squared gradients. ``early`` is the number of bytes for what a feature learns before it has
    a row. All memory is allocated at once, for ``capacity`` features and ``rows`` admitted ones; the system provides it
    when it is used. The content depends on the learned occurrences and their times only. Compiled loops call
    ``feature_steps`` with ``arrays``; :meth:`touch` and :meth:`find` are for many keys at once.

    >>> table = FeatureTable(2, weights=1, admit=2, capacity=3)
    >>> entries, given = table.touch([7, 8, 7], [0, 0, 0], squares=0.1)
    >>> entries.tolist(), given.tolist()
    ([1, 2, 1], [0, 0, 1])
    >>> keys, row_of, weights, rows, _ = table.entries()
    >>> keys.tolist(), row_of.tolist(), weights.tolist(), rows.tolist()
    ([7, 8], [1, 0], [[0.0], [0.0]], [[0.0, 0.0]])
    >>> table.counts()
    FeatureCounts(features=2, admitted=1, expired=0, evicted=0)
    """

    def __init__(
        self,
        width: int,
        *,
        weights: int,
        admit: int,
        capacity: int,
        rows: int | None = None,
        expire_ms: int = 0,
        early: int = 0,
    ) -> None:
        """``rows`` is ``rows_for(capacity, admit)`` by default; ``expire_ms=0``: features never expire.

        Raises ConfigurationError for numbers out of range.
        """
        # Imported here: it imports Numba, which takes most of a second.
        from streamiter.parameter_server.storage import feature_steps as steps

        self.steps = steps
        """The compiled functions, and the names of settings and facts."""
        self.width = whole_number("FeatureTable(width=)", width, 1)
        self.own_weights = whole_number("FeatureTable(weights=)", weights, 0)
        self.early_bytes = whole_number("FeatureTable(early=)", early, 0)
        self.capacity = whole_number("FeatureTable(capacity=)", capacity, 1, _CAPACITY_MAX)
        self.admit = whole_number("FeatureTable(admit=)", admit, 1, steps.COUNT_MAX)
        rows = rows_for(capacity, admit) if rows is None else rows
        self.rows_max = whole_number("FeatureTable(rows=)", rows, 1, capacity)
        self._settings = np.zeros(steps.SETTINGS_OF_FEATURES, np.int64)
        self._settings[steps.OWN_WEIGHTS], self._settings[steps.WIDTH] = weights, width
        self._settings[steps.ADMIT], self._settings[steps.EARLY_BYTES] = admit, early
        self._settings[steps.EXPIRE_MS] = whole_number("FeatureTable(expire_ms=)", expire_ms, 0, 2**61)
        self._settings[steps.ENTRIES_MAX], self._settings[steps.ROWS_MAX] = capacity, rows
        self._settings[steps.INDEX_MAX] = _places_for(capacity)
        check_memory("FeatureTable", self.size_bytes(), "make it with a smaller capacity")
        self._allocate()
        with saying_that_it_compiles("the arithmetic of FeatureTable"):
            self.find([0], [0])

    @classmethod
    def of_bytes(
        cls, width: int, *, weights: int, admit: int, size_bytes: int, expire_ms: int = 0, early: int = 0
    ) -> Self:
        """Return a table with room for as many features as fit into this memory.

        Raises ConfigurationError if there is room for none.
        """
        fewest, too_many = 0, _CAPACITY_MAX + 1
        while too_many - fewest > 1:
            middle = (fewest + too_many) // 2
            fits = size_of_features(width, weights, middle, rows_for(middle, admit), early) <= size_bytes
            fewest, too_many = (middle, too_many) if fits else (fewest, middle)
        if fewest == 0:
            raise ConfigurationError(
                f"FeatureTable: expected memory for at least one feature, given {size_bytes} bytes; give it at least "
                f"{size_of_features(width, weights, 1, 1, early)}"
            )
        return cls(width, weights=weights, admit=admit, capacity=fewest, expire_ms=expire_ms, early=early)

    def _allocate(self) -> None:
        entries, rows = self.capacity + 1, self.rows_max + 1
        self.arrays = self.steps.FeatureArrays(
            entries=np.zeros(_places_for(self.capacity), np.int32),
            keys=np.zeros(entries, np.int64),
            counts=np.zeros(entries, np.int32),
            last_ms=np.zeros(entries, np.int64),
            newer=np.zeros(entries, np.int32),
            older=np.zeros(entries, np.int32),
            file_of=np.zeros(entries, np.int32),
            weights=np.zeros(entries * 2 * self.own_weights, np.float32),
            row_of=np.zeros(entries, np.int32),
            early=np.zeros(entries * self.early_bytes, np.int8),
            rows=np.zeros(rows * 2 * self.width, np.float32),
            free_rows=np.zeros(rows, np.int32),
            settings=self._settings,
            facts=np.zeros(self.steps.FACTS, np.int64),
        )
        """The arrays, for compiled code."""
        self.arrays.facts[self.steps.INDEX_MASK] = min(_PLACES_AT_FIRST, len(self.arrays.entries)) - 1

    def size_bytes(self) -> int:
        """Return the memory of the arrays, whether it is in use already or not."""
        return size_of_features(self.width, self.own_weights, self.capacity, self.rows_max, self.early_bytes)

    def counts(self) -> FeatureCounts:
        """Return the numbers of features."""
        steps, facts = self.steps, self.arrays.facts
        return FeatureCounts(*facts[[steps.IN_USE, steps.ADMITTED, steps.EXPIRED, steps.EVICTED]].tolist())

    # ---- many keys at once

    def find(self, keys: npt.ArrayLike, times_ms: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Return for each key the entry of the feature that is not expired at its time, or 0."""
        keys, times = _integers(keys), _integers(times_ms)
        found = np.zeros(len(keys), np.int32)
        self.steps.find_features(self.arrays, keys, times, found)
        return found

    def touch(
        self, keys: npt.ArrayLike, times_ms: npt.ArrayLike, squares: float = 0.0, *, is_enough: bool = False
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Count an occurrence of each key at its time, in order; return the entries, and the rows that features got.

        Features begin with ``squares`` as each sum of squared gradients. An entry belongs to its feature until a later
        one may have taken it; a row is 0 where an occurrence gave none. With ``is_enough`` one occurrence admits a
        feature.
        """
        keys, times, settings = _integers(keys), _integers(times_ms), self.arrays.settings
        entries, rows = np.zeros((2, len(keys)), np.int32)
        settings[self.steps.ADMIT] = 1 if is_enough else self.admit
        self.steps.touch_features(self.arrays, keys, times, float(squares), entries, rows)
        settings[self.steps.ADMIT] = self.admit
        return entries, rows

    def renew(self, entries: npt.NDArray[np.int32]) -> None:
        """Note that these entries, or their rows, have changed without another occurrence."""
        self.steps.renew_features(self.arrays, np.require(entries, np.int32, ["C_CONTIGUOUS", "WRITEABLE"]))

    def admitted(self) -> npt.NDArray[np.int32]:
        """Return the entries of the features that have a row, by key."""
        entries = np.flatnonzero(self.arrays.row_of[: self._entries_stop()]).astype(np.int32)
        return entries[np.argsort(self.arrays.keys[entries])]

    def weights(self) -> npt.NDArray[np.float32]:
        """Return the weights by entry with their sums of squared gradients behind them; not a copy."""
        return self.arrays.weights.reshape(self.capacity + 1, -1)

    def early(self) -> npt.NDArray[np.int8]:
        """Return by entry what features without a row have learned; not a copy."""
        return self.arrays.early.reshape(self.capacity + 1, -1)

    def rows(self) -> npt.NDArray[np.float32]:
        """Return the rows by number with their sums of squared gradients behind them; not a copy."""
        return self.arrays.rows.reshape(self.rows_max + 1, -1)

    def entries(
        self,
    ) -> tuple[Integers, npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int8]]:
        """Return the keys of all features, ascending, the numbers of their rows, weights, the rows, and early bytes.

        A feature that is not admitted has row 0; the others count from 1 on in the order of their keys, and have early
        bytes of 0. Squares are left out.
        """
        used = np.flatnonzero(self.arrays.counts[: self._entries_stop()])
        used = used[np.argsort(self.arrays.keys[used])]
        row_of = self.arrays.row_of[used]
        has_row = row_of > 0
        numbers = np.where(has_row, np.cumsum(has_row), 0).astype(np.int32)
        rows = self.rows()[row_of[has_row], : self.width]
        early = self.early()[used] * ~has_row[:, None]
        return self.arrays.keys[used], numbers, self.weights()[used, : self.own_weights], rows, early

    def scale_squares(self, factor: float) -> None:
        """Multiply all sums of squared gradients: with a small factor, rates that have become small are large again."""
        rows_stop = int(self.arrays.facts[self.steps.ROWS_USED]) + 1
        self.weights()[: self._entries_stop(), self.own_weights :] *= np.float32(factor)
        self.rows()[:rows_stop, self.width :] *= np.float32(factor)
        self.arrays.file_of[: self._entries_stop()] = 0

    def _entries_stop(self) -> int:
        """Return the number behind the last entry that was ever in use."""
        return int(self.arrays.facts[self.steps.ENTRIES_USED]) + 1

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as plain data: the features in the order of their last changes.

        ``rows`` has a row for each feature that ``is admitted``, in the same order, and ``early`` the bytes of the
        others.
        """
        return self.part(self._ordered()) | self.totals()

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the :meth:`state` in parts, for :meth:`restore_parts`."""
        ordered = self._ordered()
        for stop in range(len(ordered), 0, -_FEATURES_OF_PART):
            yield self.part(ordered[max(stop - _FEATURES_OF_PART, 0) : stop])

    def _ordered(self) -> npt.NDArray[np.int32]:
        """Return the entries in the order of their last changes."""
        ordered = np.zeros(self.counts().features, np.int32)
        self.steps.newer_entries(self.arrays, 0, ordered)
        return ordered

    def part(self, entries: npt.NDArray[np.int32]) -> dict[str, Any]:
        """Return the features in these entries as plain data, in this order."""
        arrays, row_of = self.arrays, self.arrays.row_of[entries]
        return {
            "keys": arrays.keys[entries],
            "counts": arrays.counts[entries],
            "times": arrays.last_ms[entries],
            "weights": self.weights()[entries],
            "is admitted": row_of > 0,
            "rows": self.rows()[row_of[row_of > 0]],
            "early": self.early()[entries[row_of == 0]],
        }

    def file_of(self) -> npt.NDArray[np.int32]:
        """Return for each entry that was ever in use its file; 0 for none, and for free entries. Not a copy."""
        return self.arrays.file_of[: self._entries_stop()]

    def entries_of_files(self, numbers: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return the entries of files that are neighbours in the order of the last changes, in this order."""
        arrays, is_in = self.arrays, np.isin(self.file_of(), numbers)
        found = np.flatnonzero(is_in).astype(np.int32)
        if len(found):
            [before] = arrays.older[found[~is_in[arrays.older[found]]]]
            self.steps.newer_entries(arrays, int(before), found)
        return found

    def totals(self) -> dict[str, int]:
        """Return what the state has besides the features."""
        counts = self.counts()
        return {"features": counts.features, "expired": counts.expired, "evicted": counts.evicted}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on a :meth:`state`, in place of all features. The oldest ones that have no room count as evicted.

        Raises OtherModel for the state of a table with other numbers of weights and of numbers in a row, and ModelError
        for a state that no table has had; then the table is as before.
        """
        self.restore_parts(state, [(0, state)])

    def restore_parts(self, totals: Mapping[str, Any], parts: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """As :meth:`restore`, from parts with the numbers of their files, the newest part first.

        A feature counts in the first part that has it.
        """
        before = self.arrays
        self._allocate()
        try:
            missing = self._take_on(totals["features"], parts)
        except BaseException:
            self.arrays = before
            raise
        facts = self.arrays.facts
        facts[self.steps.EXPIRED], facts[self.steps.EVICTED] = totals["expired"], totals["evicted"] + missing

    def _take_on(self, features: int, parts: Iterable[tuple[int, Mapping[str, Any]]]) -> int:
        """Add the features of parts, this many in all; return how many have no room."""
        self.arrays.facts[self.steps.INDEX_MASK] = _places_for(max(1, min(features, self.capacity))) - 1
        for file, part in parts:
            self._check(part)
            if not self._add_older(file, part, features):
                break
        counts = self.counts()
        missing = features - counts.features
        if missing and counts.features < self.capacity and counts.admitted < self.rows_max:
            raise _damaged(f"{missing:,} of {features:,} features twice, or not at all")
        return missing

    def start_from(
        self,
        keys: npt.ArrayLike,
        row_of: npt.ArrayLike,
        weights: npt.ArrayLike,
        rows: npt.ArrayLike,
        early: npt.NDArray[np.int8],
        time_ms: int,
        squares: float,
    ) -> None:
        """Take on :meth:`entries`, whose last occurrence was at this time; which are the oldest is not known."""
        is_admitted, numbers = np.asarray(row_of) > 0, (np.asarray(weights), np.asarray(rows))
        own, width = (np.hstack([each, np.full(each.shape, squares)]).astype(np.float32) for each in numbers)
        part = {
            "keys": keys,
            "counts": np.where(is_admitted, self.admit, 1),
            "times": np.full(len(is_admitted), time_ms),
            "weights": own,
            "is admitted": is_admitted,
            "rows": width,
            "early": early[~is_admitted],
        }
        self.restore(part | {"features": len(is_admitted), "expired": 0, "evicted": 0})

    def _check(self, part: Mapping[str, Any]) -> None:
        given = tuple(np.shape(part[name])[1:] for name in ("weights", "rows", "early"))
        expected = (2 * self.own_weights,), (2 * self.width,), (self.early_bytes,)
        if given != expected:
            raise OtherModel(
                "FeatureTable.restore: expected the state of a table with as many weights, numbers and early bytes, "
                f"{expected}, given {given}; make the table with the same numbers"
            )
        lengths = {name: len(part[name]) for name in ("keys", "counts", "times", "is admitted", "weights")}
        rows, least = len(part["rows"]), int(np.min(part["counts"], initial=1))
        lengths["early"] = len(part["early"]) + rows
        if len({*lengths.values()}) > 1 or rows != np.count_nonzero(part["is admitted"]) or least < 1:
            raise _damaged(f"{lengths} with {rows} rows and the least count {least}")

    def _add_older(self, file: int, part: Mapping[str, Any], features: int) -> bool:
        """Add the features of a part that are not there yet, as the oldest; return False at the end of the room."""
        is_admitted, most = np.array(part["is admitted"], np.bool_), min(features, self.capacity)
        added = np.zeros(len(is_admitted), np.int32)
        left = self.steps.add_older_features(self.arrays, _integers(part["keys"]), is_admitted, most, added)
        arrays, is_new = self.arrays, added > 0
        entries, times = added[is_new], np.asarray(part["times"])
        arrays.counts[entries], arrays.last_ms[entries] = np.asarray(part["counts"])[is_new], times[is_new]
        arrays.file_of[entries] = file
        self.weights()[entries] = np.asarray(part["weights"])[is_new]
        self.early()[added[is_new & ~is_admitted]] = np.asarray(part["early"])[is_new[~is_admitted]]
        rows = np.asarray(part["rows"])[is_new[is_admitted]]
        self.rows()[arrays.row_of[added[is_admitted & is_new]]] = rows
        return int(left) == 0


def rows_for(capacity: int, admit: int) -> int:
    """Return how many rows a table needs if only features that occur ``admit`` times get one.

    By Zipf's law, of all features that have occurred one in n occurs n times or more.
    """
    return -(-capacity // admit)


def _places_for(capacity: int) -> int:
    """Return the length of the index: a power of two, at most half of which is taken."""
    return 1 << (2 * capacity - 1).bit_length()


def size_of_features(width: int, weights: int, capacity: int, rows: int, early: int = 0) -> int:
    """Return the memory of a table in bytes."""
    entries_bytes = (capacity + 1) * (_ENTRY_BYTES + _PAIR_BYTES * weights + early)
    return _PLACE_BYTES * _places_for(capacity) + entries_bytes + (rows + 1) * (_PAIR_BYTES * width + _FREE_ROW_BYTES)


def _damaged(given: str) -> ModelError:
    return ModelError(
        "FeatureTable.restore: expected different keys, each with a count, a time and weights, and a row for each "
        f"admitted one, given {given}; the state is damaged, use another one"
    )


def _integers(numbers: npt.ArrayLike) -> Integers:
    """Return the numbers in the one form that the functions are compiled for."""
    return np.require(numbers, np.int64, ["C_CONTIGUOUS", "WRITEABLE"])
