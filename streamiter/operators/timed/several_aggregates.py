"""Several aggregates at once, as users name them: which value each takes of a record, and one dict of results.

>>> several = Aggregates.of((), {"clicks": "count", "spent": ("sum", "price"), "pages": ("collect", "page")})
>>> accumulators = several.initial()
>>> for time, record in [(1, {"price": 2, "page": "/"}), (2, {"price": 3, "page": "/buy"})]:
...     [accumulators] = several.add([accumulators], time, several.values_of(record))
>>> several.result(accumulators)
{'clicks': 2, 'spent': 5, 'pages': ['/', '/buy']}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from streamiter.errors import ConfigurationError, did_you_mean, shortened
from streamiter.operators.definitions import Definition, by_name, function_in_words, names_in
from streamiter.operators.functions import field_or_function, plain_function
from streamiter.operators.keyed_state import independent_copy
from streamiter.operators.timed.aggregates import BY_NAME, Aggregate
from streamiter.values.numbers import Array, Indices
from streamiter.values.records import Columns

ValueOf = Callable[[Any], Any]
"""Returns the value of a record."""

AggregateSpec = str | Aggregate | tuple[str | Aggregate, str | Callable[[Any], Any]]
"""What users write: a name, or an aggregate, alone or in a pair with the value: a field's name or a function."""


class Aggregates:
    """Several aggregates of the same records. Without names there is one, whose result is not in a dict.

    There may be fewer accumulators than aggregates. The last aggregates were then added later: they do not know all
    records, so their result is None.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        aggregates: Sequence[Aggregate],
        values: Sequence[ValueOf | None],
        *,
        is_atomic: bool = False,
    ) -> None:
        """``is_atomic``: the functions of a user get copies, so that a record for which one raises has no effect."""
        self._shown = names
        """The names in the order of a result."""
        self._is_atomic = is_atomic
        self._set(names, aggregates, values)

    def _set(
        self, names: Sequence[str] | None, aggregates: Sequence[Aggregate], values: Sequence[ValueOf | None]
    ) -> None:
        self._names = names
        self._aggregates = tuple(aggregates)
        self._values = tuple(values)
        self._take_arrays = all(aggregate.takes_arrays for aggregate in aggregates)
        # Those that change accumulators come last, so that a record is added to all or, if one raises, to none.
        self._order = sorted(range(len(aggregates)), key=lambda number: aggregates[number].adds_in_place)
        self._copied = [number for number in self._order if self._is_atomic and aggregates[number].may_raise_midway]

    @staticmethod
    def of(one: Sequence[AggregateSpec], named: Mapping[str, AggregateSpec]) -> Aggregates:
        """Return the aggregates that a user has written; raise ConfigurationError for a wrong one."""
        if len(one) + bool(named) != 1:
            raise ConfigurationError(
                f"aggregate: expected one aggregate, or several by name, given {len(one)} without a name and "
                f'{len(named)} by name; write aggregate("count") or aggregate(clicks="count", spent=("sum", "price"))'
            )
        parsed = [_parsed(spec, name) for name, spec in (named or {"value": one[0]}).items()]
        return Aggregates(tuple(named) or None, [each for each, _ in parsed], [value for _, value in parsed])

    def copy(self, *, is_atomic: bool = False) -> Aggregates:
        """Return the same aggregates for one operator, which may :meth:`adopt` an order of accumulators.

        ``is_atomic``: the step survives records for which a function raises.
        """
        return Aggregates(self._names, self._aggregates, self._values, is_atomic=is_atomic or self._is_atomic)

    def definition(self) -> Definition:
        """Return what each of them computes, by name, in the order of the accumulators."""
        texts = [
            type(each).__name__.lower() + ("" if value_of is None else f" of {function_in_words(value_of)}")
            for each, value_of in zip(self._aggregates, self._values, strict=True)
        ]
        return by_name(dict(zip(self._names or _ONE, texts, strict=True)))

    def adopt(self, definition: Definition) -> None:
        """Put the accumulators into the order of a state with this definition; new ones come last."""
        mine, before = list(self._names or _ONE), names_in(definition)
        order = [mine.index(name) for name in dict.fromkeys([*before, *mine])]
        self._set(
            self._names and [mine[number] for number in order],
            [self._aggregates[number] for number in order],
            [self._values[number] for number in order],
        )

    @property
    def merge_is_missing(self) -> bool:
        """Whether one of them cannot merge accumulators."""
        return not all(aggregate.merges for aggregate in self._aggregates)

    def values_of(self, record: Any) -> list[Any]:
        """Return the value of a record for each aggregate; raise where one cannot take it."""
        return [
            aggregate.checked(record if value_of is None else value_of(record))
            for aggregate, value_of in zip(self._aggregates, self._values, strict=True)
        ]

    @property
    def have_digests(self) -> bool:
        """Whether all of them aggregate many records faster by parts."""
        return all(aggregate.has_digests for aggregate in self._aggregates)

    def columns_of(self, batch: Sequence[Any] | Array | Columns) -> list[Array | None] | None:
        """Return an array of values for each aggregate that needs one; None if arrays cannot do what ``add`` does."""
        if not self._take_arrays:
            return None
        columns: list[Array | None] = []
        for aggregate, value_of in zip(self._aggregates, self._values, strict=True):
            column = None
            if aggregate.needs_value or value_of is not None:
                column = _column(batch, value_of)
                if column is None:
                    return None
            columns.append(column)
        return columns

    def initial(self) -> list[Any]:
        """Return the accumulators of a window without records."""
        return [aggregate.initial() for aggregate in self._aggregates]

    def add(self, windows: Sequence[list[Any]], time: int, values: list[Any]) -> list[list[Any]]:
        """Return the accumulators of some windows with a record, whose values ``values_of`` has returned.

        If one raises, all windows are as they were; for functions, only with ``is_atomic``.
        """
        added = [accumulators.copy() for accumulators in windows]
        for number in self._order:
            add = self._aggregates[number].add
            for accumulators in added:
                if number < len(accumulators):
                    before = accumulators[number]
                    accumulators[number] = add(
                        independent_copy(before) if number in self._copied else before, time, values[number]
                    )
        return added

    def added(self, times: Sequence[int], values: Sequence[list[Any]]) -> list[Any]:
        """Return the accumulators of some records, in order."""
        return [
            aggregate.added(times, [of_record[number] for of_record in values])
            for number, aggregate in enumerate(self._known(values))
        ]

    def _known(self, values: Sequence[list[Any]]) -> Sequence[Aggregate]:
        """Return the aggregates that all of these accumulators, or values of records, have."""
        return self._aggregates[: min(map(len, values), default=len(self._aggregates))]

    def digests(self, times: Sequence[int], values: Sequence[list[Any]]) -> list[Any]:
        """Return for each aggregate what ``combined`` needs of some records, at least one of them."""
        return [
            aggregate.digest(times, [of_record[number] for of_record in values])
            for number, aggregate in enumerate(self._known(values))
        ]

    def combined(self, digests: Sequence[list[Any]]) -> list[Any] | None:
        """Return the accumulators of all records of these parts, in order; None where only ``added`` can do that."""
        combined = [
            aggregate.combined([digest[number] for digest in digests])
            for number, aggregate in enumerate(self._known(digests))
        ]
        return None if any(each is None for each in combined) else combined

    def add_groups(
        self, accumulators: list[list[Any]], groups: Indices, counts: Indices, columns: list[Array | None]
    ) -> list[list[Any]] | None:
        """Return the accumulators of each group with arrays of records; None where records must be added one by one.

        Nothing has changed then.
        """
        if len(self._known(accumulators)) < len(self._aggregates):
            return None
        added: list[list[Any]] = []
        for number, (aggregate, column) in enumerate(zip(self._aggregates, columns, strict=True)):
            of_groups = aggregate.add_groups([each[number] for each in accumulators], groups, counts, column)
            if of_groups is None:
                return None
            added.append(of_groups)
        return [list(each) for each in zip(*added, strict=True)]

    def merge(self, earlier: list[Any], later: list[Any]) -> list[Any]:
        """Return the accumulators of the records of two windows; all records of the first are before the others."""
        known = self._known([earlier, later])
        for number in self._copied:
            if number < len(known):
                earlier, later = earlier.copy(), later.copy()
                earlier[number], later[number] = independent_copy(earlier[number]), independent_copy(later[number])
        return [aggregate.merge(earlier[number], later[number]) for number, aggregate in enumerate(known)]

    def result(self, accumulators: list[Any]) -> Any:
        """Return the aggregate, or a dict with all by name."""
        results = [
            aggregate.result(accumulator)
            for aggregate, accumulator in zip(self._aggregates, accumulators, strict=False)
        ]
        if self._names is None or self._shown is None:
            return results[0]
        known = dict(zip(self._names, results, strict=False))
        return (
            known
            if self._names == self._shown and len(known) == len(self._shown)
            else {name: known.get(name) for name in self._shown}
        )


_ONE: Final = ("value",)
"""The name of the only aggregate in a definition: the name of the field that has it in a result."""


class FieldOf:
    """Returns a field of a record, by key or by attribute; of ``Columns`` the column."""

    def __init__(self, name: str, argument: str) -> None:
        self.name = name
        self.__qualname__ = f"field {name!r}"
        self._of_record = field_or_function(argument, name)

    def __call__(self, record: Any, /) -> Any:
        return self._of_record(record)


def _column(batch: Sequence[Any] | Array | Columns, value_of: ValueOf | None) -> Array | None:
    """Return the values of a batch if numpy's arithmetic with them gives the same as Python's."""
    column: Any = batch
    if isinstance(batch, Columns):
        if not isinstance(value_of, FieldOf) or value_of.name not in batch:
            return None
        column = batch[value_of.name]
    elif isinstance(batch, list):
        column = _array_of(batch if value_of is None else list(map(value_of, batch)))
    elif value_of is not None:
        return None
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype not in _EXACT_TYPES:
        return None
    return column


def _array_of(values: list[Any]) -> Array | None:
    """Return floats, or ints of 64 bits, as an array."""
    kinds = set(map(type, values))
    if kinds != {float} and kinds != {int}:
        return None
    try:
        return np.array(values, np.float64 if kinds == {float} else np.int64)
    except OverflowError:
        return None


def _parsed(spec: AggregateSpec, name: str) -> tuple[Aggregate, ValueOf | None]:
    kind, *value = spec if isinstance(spec, tuple) else (spec,)
    if isinstance(kind, str):
        if kind not in BY_NAME:
            raise ConfigurationError(
                f"aggregate: expected {', '.join(map(repr, BY_NAME))}, quantile(q) or fold(…), given {kind!r}"
                f"{did_you_mean(kind, BY_NAME)}"
            )
        kind = BY_NAME[kind]()
    if not isinstance(kind, Aggregate) or len(value) > 1:
        raise ConfigurationError(
            f'aggregate: expected a name such as "sum", or a pair with the field of the value, given '
            f'{shortened(spec)}; write ("sum", "price"), or fold(initial, add) for functions'
        )
    if not value:
        return kind, None
    of = value[0]
    argument = f"aggregate({name})"
    return kind, FieldOf(of, argument) if isinstance(of, str) else plain_function(argument, of)


_EXACT_TYPES: Final = frozenset(map(np.dtype, ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"]))
"""Types of values that are the same as numbers of Python."""
