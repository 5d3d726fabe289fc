"""Aggregates: one value from the records of a window.

An aggregate by name is ``"count"``, ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"first"``, ``"last"``,
``"collect"`` or ``"profile"``; :func:`quantile` and :func:`fold` make others. An *accumulator* is the plain data that
an aggregate keeps for a window.

>>> mean = BY_NAME["mean"]()
>>> mean.result(mean.add(mean.add(mean.initial(), 0, 4), 0, 5))
4.5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamiter.errors import ConfigurationError, shortened
from streamiter.operators.functions import misfit, plain_function
from streamiter.operators.keyed_state import independent_copy
from streamiter.values.helpers.importing import need_package
from streamiter.values.numbers import Array, Indices, plain_float, plain_scalar

if TYPE_CHECKING:
    from streamiter.values.field_profiles import ValueProfile


class Aggregate:
    """Base class of the aggregates. ``add`` and ``merge`` return the new accumulator, and may change the first one."""

    needs_value: bool = True
    """Whether it aggregates a value of the record, and not only the number of records."""

    merges: bool = True
    """Whether two accumulators can become one, as sessions need."""

    takes_arrays: bool = False
    """Whether it defines ``add_groups``."""

    has_digests: bool = True
    """Whether it aggregates many records faster by parts, with ``digest`` and ``combined``."""

    adds_in_place: bool = False
    """Whether ``add`` changes the accumulator; it never raises then."""

    may_raise_midway: bool = False
    """Whether ``add`` and ``merge`` may raise when they have changed an accumulator."""

    def initial(self) -> Any:
        """Return the accumulator of a window without records."""
        raise NotImplementedError

    def checked(self, value: Any) -> Any:
        """Return a value as ``add`` takes it; raise for a value that cannot be aggregated."""
        if value is None:
            raise ValueError(f"{self}: expected a value, given None; filter such records, or give them a value before")
        return plain_scalar(value)

    def add(self, accumulator: Any, time: int, value: Any) -> Any:
        """Add a value."""
        raise NotImplementedError

    def added(self, times: Sequence[int], values: Sequence[Any]) -> Any:
        """Return the accumulator of some records, in the order of (time, arrival)."""
        accumulator = self.initial()
        for time, value in zip(times, values, strict=True):
            accumulator = self.add(accumulator, time, value)
        return accumulator

    def digest(self, times: Sequence[int], values: Sequence[Any]) -> Any:
        """Return the data that ``combined`` needs of one or more records; they never change."""
        return self.added(times, values)

    def combined(self, digests: Sequence[Any]) -> Any:
        """Return the accumulator of all records of these parts, in order; None where only ``added`` can do that."""
        return reduce(self.merge, digests)

    def add_groups(
        self, accumulators: list[Any], groups: Indices, counts: Indices, values: Array | None
    ) -> list[Any] | None:
        """Add arrays: ``values[i]`` to the accumulator ``groups[i]``. None where only ``add`` can do that.

        ``counts`` are the numbers of values of each group, all above 0. The result equals the result of ``add``, to the
        bit.
        """
        return None

    def merge(self, earlier: Any, later: Any) -> Any:
        """Return the accumulator of two groups of records; all records of the first one are before the other's."""
        raise NotImplementedError

    def result(self, accumulator: Any) -> Any:
        """Return the aggregate: a value that later calls do not change."""
        return accumulator

    def __str__(self) -> str:
        return type(self).__name__.lower()


class Count(Aggregate):
    """The number of records."""

    takes_arrays = True
    needs_value = False

    def initial(self) -> int:
        return 0

    def checked(self, value: Any) -> Any:
        return value

    def add(self, accumulator: int, time: int, value: Any) -> int:
        return accumulator + 1

    def add_groups(
        self, accumulators: list[Any], groups: Indices, counts: Indices, values: Array | None
    ) -> list[Any] | None:
        return [before + count for before, count in zip(accumulators, counts.tolist(), strict=True)]

    def merge(self, earlier: int, later: int) -> int:
        return earlier + later


class NumberAggregate(Aggregate):
    """Base class of the aggregates of numbers: ints, floats and bools."""

    def checked(self, value: Any) -> Any:
        value = plain_scalar(value)
        if isinstance(value, (int, float)):
            return value
        raise TypeError(f"{self}: expected a number, given {shortened(value)}; filter such records, or use fold(…)")


class Sum(NumberAggregate):
    """The sum of numbers, from left to right; sums of ints are exact."""

    takes_arrays = True

    def initial(self) -> int:
        return 0

    def add(self, accumulator: Any, time: int, value: Any) -> Any:
        return accumulator + value

    def add_groups(
        self, accumulators: list[Any], groups: Indices, counts: Indices, values: Array | None
    ) -> list[Any] | None:
        assert values is not None
        sums = _as_array(accumulators, values, adds=True)
        if sums is None:
            return None
        # One value after the other, unlike np.sum and np.add.reduceat, whose rounding depends on the batch.
        with np.errstate(all="ignore"):
            np.add.at(sums, groups, values.astype(sums.dtype, copy=False))
        added: list[Any] = sums.tolist()
        return added

    def digest(self, times: Sequence[int], values: Sequence[Any]) -> Any:
        """Return the sum, None if there are floats; and the values as floats, None if there are large ints."""
        kinds = set(map(type, values))
        is_exact = kinds == {float} or max(map(abs, (value for value in values if type(value) is not float))) < _SMALL
        return None if float in kinds else sum(values), np.array(values, np.float64) if is_exact else None

    def combined(self, digests: Sequence[Any]) -> Any:
        sums, values = zip(*digests, strict=True)
        if None not in sums:
            return sum(sums)
        if any(each is None for each in values) or sum(map(len, values)) > _SUMMED_EXACTLY:
            return None
        # From left to right, unlike np.sum; the first addition is to the int 0, which makes 0.0 of −0.0.
        with np.errstate(all="ignore"):
            return float(np.add.accumulate(np.concatenate([[0.0], *values]))[-1])

    def merge(self, earlier: Any, later: Any) -> Any:
        return earlier + later


class Mean(NumberAggregate):
    """The mean of numbers; None without records."""

    takes_arrays = True

    def __init__(self) -> None:
        self._sum = Sum()

    def initial(self) -> list[Any]:
        return [0, 0]

    def add(self, accumulator: list[Any], time: int, value: Any) -> list[Any]:
        return [accumulator[0] + value, accumulator[1] + 1]

    def add_groups(
        self, accumulators: list[Any], groups: Indices, counts: Indices, values: Array | None
    ) -> list[Any] | None:
        sums = self._sum.add_groups([before[0] for before in accumulators], groups, counts, values)
        if sums is None:
            return None
        return [
            [total, before[1] + count] for total, before, count in zip(sums, accumulators, counts.tolist(), strict=True)
        ]

    def digest(self, times: Sequence[int], values: Sequence[Any]) -> Any:
        return self._sum.digest(times, values), len(values)

    def combined(self, digests: Sequence[Any]) -> Any:
        total = self._sum.combined([part for part, _ in digests])
        return None if total is None else [total, sum(count for _, count in digests)]

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return [earlier[0] + later[0], earlier[1] + later[1]]

    def result(self, accumulator: list[Any]) -> Any:
        total, count = accumulator
        return total / count if count else None


class Extreme(Aggregate):
    """Base class of min and max: the first of the values that no other value exceeds; NaN if there is a NaN."""

    takes_arrays = True

    exceeds: Callable[[Any, Any], Any]
    ufunc: np.ufunc
    worst: float

    def initial(self) -> None:
        return None

    def checked(self, value: Any) -> Any:
        value = super().checked(value)
        return value + 0.0 if isinstance(value, float) else value  # No −0: it equals 0, and the first would count.

    def add(self, accumulator: Any, time: int, value: Any) -> Any:
        if accumulator is None or value != value or self.exceeds(value, accumulator):
            return value
        return accumulator

    def add_groups(
        self, accumulators: list[Any], groups: Indices, counts: Indices, values: Array | None
    ) -> list[Any] | None:
        assert values is not None
        is_float = values.dtype.kind == "f"
        worst = self.worst if is_float else int(math.copysign(1, self.worst)) * _INT64_MAX
        found = _as_array([worst if before is None else before for before in accumulators], values, adds=False)
        if found is None or values.dtype.kind == "b":
            return None
        with np.errstate(all="ignore"):
            self.ufunc.at(found, groups, values + 0.0 if is_float else values.astype(found.dtype, copy=False))
        extremes: list[Any] = found.tolist()
        return extremes

    def merge(self, earlier: Any, later: Any) -> Any:
        return earlier if later is None else self.add(earlier, 0, later)


class Min(Extreme):
    """The least value; None without records."""

    exceeds = staticmethod(lambda value, least: value < least)
    ufunc = np.minimum
    worst = math.inf


class Max(Extreme):
    """The greatest value; None without records."""

    exceeds = staticmethod(lambda value, greatest: value > greatest)
    ufunc = np.maximum
    worst = -math.inf


class First(Aggregate):
    """The value of the earliest record (of simultaneous records, the first to arrive); None without records."""

    def initial(self) -> list[Any]:
        return []

    def add(self, accumulator: list[Any], time: int, value: Any) -> list[Any]:
        return [time, value] if not accumulator or time < accumulator[0] else accumulator

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return earlier or later

    def result(self, accumulator: list[Any]) -> Any:
        return independent_copy(accumulator[1]) if accumulator else None


class Last(First):
    """The value of the latest record (of simultaneous records, the last to arrive); None without records."""

    def add(self, accumulator: list[Any], time: int, value: Any) -> list[Any]:
        return [time, value] if not accumulator or time >= accumulator[0] else accumulator

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return later or earlier


class CollectValues(Aggregate):
    """A list of all values, by time, simultaneous ones by arrival."""

    adds_in_place = True
    has_digests = False

    def initial(self) -> list[Any]:
        return []

    def add(self, accumulator: list[Any], time: int, value: Any) -> list[Any]:
        accumulator.append((time, value))
        return accumulator

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return earlier + later

    def result(self, accumulator: list[Any]) -> list[Any]:
        return [independent_copy(value) for _, value in sorted(accumulator, key=itemgetter(0))]


# Calls of numpy cost as much as some hundred values.
_WAITING_VALUES: Final = 1_024


class Profile(Aggregate):
    """What the values were, in bounded memory: ``compare_profiles`` compares the profiles of two windows.

    The accumulator is the number of records, the values that wait, and the state of a ``ValueProfile``.
    """

    adds_in_place = True

    def __init__(self) -> None:
        # Imported here: other windows do not need to know how fields are read.
        from streamiter.values.field_profiles import ValueProfile
        from streamiter.values.hashes import hash_of

        self._profiles = ValueProfile
        self._code_of = lru_cache(65_536)(lambda text: hash_of(text.encode("utf-8", "surrogatepass")) >> 1)

    def initial(self) -> list[Any]:
        return [0, [], self._profiles.empty().state()]

    def checked(self, value: Any) -> Any:
        value = plain_scalar(value)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, (int, float)):
            return plain_float(value)
        raise TypeError(f"{self}: expected a number, a text or None, given {shortened(value)}; convert it before")

    def add(self, accumulator: list[Any], time: int, value: Any) -> list[Any]:
        accumulator[0] += 1
        accumulator[1].append(value)
        if len(accumulator[1]) == _WAITING_VALUES:
            accumulator[1:] = [], self._counted(accumulator).state()
        return accumulator

    def _counted(self, accumulator: list[Any]) -> ValueProfile:
        _, waiting, state = accumulator
        profile = self._profiles.of_state(state)
        profile.add_numbers(np.array([value for value in waiting if isinstance(value, float)]))
        texts = [self._code_of(value) for value in waiting if isinstance(value, str)]
        profile.add_texts(np.array(texts, np.intp))
        profile.rows += len(texts)
        return profile

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        profile = self._counted(earlier)
        profile.merge(self._counted(later))
        return [earlier[0] + later[0], [], profile.state()]

    def result(self, accumulator: list[Any]) -> dict[str, Any]:
        return {"records": accumulator[0], **self._counted(accumulator).state()}


# The relative error of a quantile: the value returned is at most this far from a value of that rank.
_ACCURACY: Final = 0.01


class Quantile(NumberAggregate):
    """A quantile, with a relative error of 1 %, by the sketch of DDSketch.

    The sketch counts the values by bins whose borders grow by 2 %. It is plain data here: the bins of the positive
    and of the negative values with their counts, the number of zeros, and the number of NaNs.
    """

    adds_in_place = True

    def __init__(self, q: float) -> None:
        self._q = q
        self._library = _ddsketch()
        self._mapping = self._library.mapping.LogarithmicMapping(_ACCURACY)

    def initial(self) -> list[Any]:
        return [{}, {}, 0, 0]

    def checked(self, value: Any) -> Any:
        value = super().checked(value)
        if abs(value) > self._mapping.max_possible:  # Not true of NaN.
            raise ValueError(f"{self}: expected a finite number, given {value!r}; filter such records before")
        return value

    def add(self, accumulator: list[Any], time: int, value: Any) -> list[Any]:
        if value != value:
            accumulator[3] += 1
        elif abs(value) < self._mapping.min_possible:
            accumulator[2] += 1
        else:
            bins, bin_of_value = accumulator[value < 0], self._mapping.key(abs(value))
            bins[bin_of_value] = bins.get(bin_of_value, 0) + 1
        return accumulator

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        return self.combined([earlier, later])

    def combined(self, digests: Sequence[Any]) -> list[Any]:
        accumulator = self.initial()
        for *signs, zeros, nans in digests:
            for bins, of_part in zip(accumulator[:2], signs, strict=True):
                for bin_of_value, count in of_part.items():
                    bins[bin_of_value] = bins.get(bin_of_value, 0) + count
            accumulator[2] += zeros
            accumulator[3] += nans
        return accumulator

    def result(self, accumulator: list[Any]) -> Any:
        *signs, zeros, nans = accumulator
        if nans:
            return math.nan
        stores = [self._library.store.DenseStore() for _ in signs]
        for store, bins in zip(stores, signs, strict=True):
            for bin_of_value, count in sorted(bins.items()):
                store.add(bin_of_value, count)
        sketch = self._library.ddsketch.BaseDDSketch(self._mapping, *stores, zeros)
        value = sketch.get_quantile_value(self._q)
        return None if value is None else float(value)  # It is the int 0 for a zero.

    def __str__(self) -> str:
        return f"quantile({self._q})"


@cache
def _ddsketch() -> Any:
    need_package("quantile(q)", "ddsketch", "windows")
    import ddsketch

    return ddsketch


class Fold(Aggregate):
    """An aggregate by functions of the user; see :func:`fold`."""

    may_raise_midway = True

    def __init__(
        self,
        initial: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        merge: Callable[[Any, Any], Any] | None,
        result: Callable[[Any], Any],
    ) -> None:
        self._initial = initial
        self._add = add
        self._merge = merge
        self._result = result
        self.merges = self.has_digests = merge is not None

    def initial(self) -> Any:
        return self._initial() if callable(self._initial) else independent_copy(self._initial)

    def checked(self, value: Any) -> Any:
        return value

    def add(self, accumulator: Any, time: int, value: Any) -> Any:
        return self._add(accumulator, value)

    def combined(self, digests: Sequence[Any]) -> Any:
        return reduce(self.merge, map(independent_copy, digests))  # The function may change its argument.

    def merge(self, earlier: Any, later: Any) -> Any:
        assert self._merge is not None
        return self._merge(earlier, later)

    def result(self, accumulator: Any) -> Any:
        return self._result(accumulator)


BY_NAME: Final[Mapping[str, Callable[[], Aggregate]]] = {
    "count": Count,
    "sum": Sum,
    "mean": Mean,
    "min": Min,
    "max": Max,
    "first": First,
    "last": Last,
    "collect": CollectValues,
    "profile": Profile,
}
"""The aggregates that are texts."""


def quantile(q: float) -> Aggregate:
    """Return the aggregate of a quantile, from 0 to 1, of numbers; its relative error is 1 %.

    It needs the package ddsketch: ``pip install 'streamiter[windows]'``.

    >>> p90 = quantile(0.9)
    >>> accumulator = p90.initial()
    >>> for latency_ms in range(1, 101):
    ...     accumulator = p90.add(accumulator, 0, latency_ms)
    >>> abs(p90.result(accumulator) - 90) < 1
    True
    """
    number = plain_float(q)
    if not 0.0 <= number <= 1.0:
        raise ConfigurationError(f"quantile(q): expected a number from 0 to 1, given {q!r}; 0.5 is the median")
    return Quantile(number)


def fold(
    initial: Any,
    add: Callable[[Any, Any], Any],
    merge: Callable[[Any, Any], Any] | None = None,
    result: Callable[[Any], Any] | None = None,
) -> Aggregate:
    """Return an aggregate by functions: ``add(accumulator, value)`` for each value, then ``result(accumulator)``.

    ``initial`` is the accumulator of an empty window: plain data, or a function without arguments that makes it, such
    as ``list``. ``add`` may change the accumulator, and returns it. ``merge(earlier, later)`` returns the accumulator
    of two; session windows require it. Without ``result``, the result is a copy of the accumulator.

    >>> distinct = fold(dict, lambda seen, page: seen | {page: True}, lambda a, b: a | b, len)
    >>> distinct.result(distinct.add(distinct.initial(), 0, "/"))
    1
    """
    if callable(initial):
        _check("fold(initial)", initial, [])
    _check("fold(add)", add, ["accumulator", "value"])
    if merge is not None:
        _check("fold(merge)", merge, ["earlier", "later"])
    if result is not None:
        _check("fold(result)", result, ["accumulator"])
    return Fold(initial, add, merge, result or independent_copy)


def _check(argument: str, f: Callable[..., Any], arguments: list[str]) -> None:
    if reason := misfit(plain_function(argument, f), arguments):
        raise ConfigurationError(f"{argument}: expected a function of {arguments}, given {reason}")


# This many ints before the first float have the same sum as floats, below 2⁵³, if each is below ``_SMALL``.
_SMALL: Final = 2**32
_SUMMED_EXACTLY: Final = 2**21

# Sums of fewer than 2⁶³ in absolute value do not wrap around.
_INT64_MAX: Final = 2**63 - 1


def _as_array(accumulators: list[Any], values: Array, *, adds: bool) -> Array | None:
    """Return the accumulators as an array that ``values`` can be added to exactly as Python would; None if none can.

    ``adds``: the sum of all values must fit, too.
    """
    kinds = set(map(type, accumulators))
    if values.dtype.kind == "f":
        # The first addition makes a float from the int 0, and other ints are rare.
        if not kinds <= {float, int} or (int in kinds and not adds):
            return None
        if any(type(each) is int and abs(each) >= 2**53 for each in accumulators):
            return None
        return np.array(accumulators, dtype=np.float64)
    if kinds != {int}:
        return None
    largest = max(abs(int(values.min())), abs(int(values.max()))) * (len(values) if adds else 1)
    if largest + (max(map(abs, accumulators)) if adds else 0) > _INT64_MAX:
        return None
    if max(map(abs, accumulators)) > _INT64_MAX:
        return None
    return np.array(accumulators, dtype=np.int64)
