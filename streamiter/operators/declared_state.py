"""Declared state: each field of the state of an operator, a learner or a part of one is listed once, in its class.

:func:`declared` declares a field: its first value, its *form* in a snapshot, and its *share*, which says what becomes
of the values of the old subtasks when a job resumes with another parallelism. An attribute ``_records_read`` is the
entry ``"records read"`` of the state. :class:`DeclaredState` makes ``state`` and ``restore`` of the fields,
:class:`DeclaredOperator` makes ``snapshot`` and ``restore``, and :class:`SharedOperator` also ``redistribute``.

>>> class Seen(DeclaredState):
...     records = declared(0, share=SUM)
...     _last_epoch = declared(-1, share=LEAST)
>>> states = []
>>> for records in (3, 4, 5):
...     seen = Seen()
...     seen.records = records
...     states.append(seen.state())
>>> Seen.redistribute(states, 2)
[{'records': 8, 'last epoch': -1}, {'records': 4, 'last epoch': -1}]

Users' operators have ``snapshot``, ``restore`` and ``redistribute`` of their own. So has the engine where a state is
more than its fields: there a method adds to what the declaration makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, ClassVar, Final, Self, TypeAlias, TypeVar, overload

from streamiter.errors import CheckpointError, InternalError
from streamiter.operators.operator import EngineOperator
from streamiter.values.subtasks import subtask_of_partition

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Form:
    """How a value becomes plain data that never changes, and how the data becomes the value again. None stays None."""

    plain: Callable[[Any], Any]
    value: Callable[[Any], Any] | None = None
    """Returns the value of the data; None for an object that takes on the data itself."""
    take_on: Callable[[Any, Any], object] = lambda part, data: part.restore(data)
    """Is given the object and the data, if the step has such an object now."""

    def of(self, data: Any) -> Any:
        """Return the value of the data."""
        assert self.value is not None
        return None if data is None else self.value(data)


def _lists(sequences: Iterable[Iterable[Any]]) -> list[list[Any]]:
    return [list(each) for each in sequences]


def _copied_lists(lists: Mapping[Any, Iterable[Any]]) -> dict[Any, list[Any]]:
    return {key: list(each) for key, each in lists.items()}


def _copied_dicts(dicts: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, dict[Any, Any]]:
    return {key: dict(each) for key, each in dicts.items()}


COPIED: Final = Form(methodcaller("copy"), methodcaller("copy"))
"""The form of a list, a dict or an array that changes in place."""
LISTS: Final = Form(_lists, _lists)
LISTS_BY_KEY: Final = Form(_copied_lists, _copied_lists)
DICTS_BY_KEY: Final = Form(_copied_dicts, _copied_dicts)
NESTED: Final = Form(methodcaller("state"))
"""The form of an object that has ``state`` and ``restore``."""
NESTED_BY_KEY: Final = Form(
    lambda parts: {key: part.state() for key, part in parts.items()},
    take_on=lambda parts, data: [parts[key].restore(each) for key, each in data.items()],
)

Share: TypeAlias = Callable[[str, Sequence[Any], int], Sequence[Any]]
"""Returns the field's values for all new subtasks, from its name, its entries in the states of the old subtasks, and
the number of new subtasks."""


def _known(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def for_all(of_all: Callable[[Sequence[Any]], Any]) -> Share:
    """Return the share that gives all new subtasks one value, made of the values of the old subtasks."""
    return lambda name, values, parallelism: [of_all(values)] * parallelism


LEAST: Final = for_all(min)
GREATEST: Final = for_all(max)
EVERY: Final = for_all(all)
"""Whether the value is true at every old subtask."""
FIRST: Final = for_all(lambda values: values[0])
"""All old subtasks have the same value."""
FIRST_KNOWN: Final = for_all(_known)
"""The first value that is not None, if any subtask has one."""


def again(value: object) -> Share:
    """Return the share of a field that begins again with ``value``."""
    return for_all(lambda values: value)


def _same(name: str, values: Sequence[Any], parallelism: int) -> Sequence[Any]:
    if any(value != values[0] for value in values):
        raise CheckpointError(f"some of them are further than others ({name})")
    return [values[0]] * parallelism


def _sums(name: str, values: Sequence[Any], parallelism: int) -> Sequence[Any]:
    return [sum(values[subtask::parallelism]) for subtask in range(parallelism)]


def _joined(name: str, values: Sequence[Sequence[Any]], parallelism: int) -> Sequence[Any]:
    return [[item for each in values[subtask::parallelism] for item in each] for subtask in range(parallelism)]


def _of_same_number(name: str, values: Sequence[Any], parallelism: int) -> Sequence[Any]:
    return [*values, *[0] * parallelism][:parallelism]


SAME: Final[Share] = _same
"""As ``FIRST``; the subtasks can be redistributed only while the value is the same at all of them."""
SUM: Final[Share] = _sums
"""The new subtask i has the sum of the old subtasks i, i + n, …"""
JOINED: Final[Share] = _joined
"""As ``SUM``, for lists."""
OF_SAME_NUMBER: Final[Share] = _of_same_number
"""A new subtask has the counts of the old subtask with the same number; without an old subtask it has 0."""


def by_partition(joined: Callable[[Any, Any], Any]) -> Share:
    """Return the share of a dict by partition: partition p goes to subtask p modulo n, None to all of them.

    ``joined`` returns the one value for a partition that several old subtasks know.
    """

    def shares(name: str, values: Sequence[Mapping[int | None, Any]], parallelism: int) -> list[dict[int | None, Any]]:
        known: dict[int | None, Any] = {}
        for partition, value in (item for each in values for item in each.items()):
            known[partition] = joined(known[partition], value) if partition in known else value
        return [
            {
                key: value
                for key, value in known.items()
                if key is None or subtask_of_partition(key, parallelism) == subtask
            }
            for subtask in range(parallelism)
        ]

    return shares


def of_nested(redistribute: Callable[[Sequence[Any], int], Sequence[Any]]) -> Share:
    """Return the share of a part that has ``redistribute`` itself."""
    return lambda name, values, parallelism: redistribute(values, parallelism)


@dataclass(frozen=True, slots=True)
class _Field:
    """A declaration; ``first`` makes the first value, if ``__init__`` does not."""

    first: Callable[[], Any] | None
    form: Form | None
    share: Share | None

    def plain(self, value: Any) -> Any:
        """Return a value as plain data."""
        return value if self.form is None or value is None else self.form.plain(value)


@overload
def declared(first: Value, /, *, form: Form | None = None, share: Share | None = None) -> Value: ...
@overload
def declared(*, made: Callable[[], Value], form: Form | None = None, share: Share | None = None) -> Value: ...
@overload
def declared(*, form: Form | None = None, share: Share | None = None) -> Any: ...
def declared(
    *first: Any, made: Callable[[], Any] | None = None, form: Form | None = None, share: Share | None = None
) -> Any:
    """Declare a field in the body of a class derived from :class:`DeclaredState` or :class:`DeclaredOperator`.

    ``made`` makes the first value, if it changes in place; without any, ``__init__`` sets the field. Without a form
    the value is plain data that never changes in place. Without a share the subtasks cannot be redistributed.
    """
    return _Field((lambda: first[0]) if first else made, form, share)


class _Declares:
    """What both kinds of classes do with their fields."""

    _declared_fields: ClassVar[Mapping[str, tuple[str, _Field]]] = {}
    """The attribute and its declaration, by entry of the state; fields of the base classes come first."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = {name: field for name, field in vars(cls).items() if isinstance(field, _Field)}
        for name in own:
            delattr(cls, name)  # It would slow down each use of the attribute of an instance.
        inherited = [item for base in reversed(cls.__mro__) for item in vars(base).get("_declared_fields", {}).items()]
        cls._declared_fields = dict(inherited) | {name.strip("_").replace("_", " "): (name, own[name]) for name in own}

    def __new__(cls, *args: Any, **options: Any) -> Self:
        new = super().__new__
        made = new(cls) if new is object.__new__ else new(cls, *args, **options)
        for name, field in cls._declared_fields.values():
            if field.first is not None:
                setattr(made, name, field.first())
        return made

    def _declared_state(self) -> dict[str, Any]:
        return {entry: field.plain(getattr(self, name)) for entry, (name, field) in self._declared_fields.items()}

    @classmethod
    def at_start(cls) -> dict[str, Any]:
        """Return the state of a new object: the first values of all fields that are declared with one."""
        return {entry: field.plain(field.first()) for entry, (_, field) in cls._declared_fields.items() if field.first}

    def _take_on_declared(self, state: Mapping[str, Any]) -> None:
        for entry, (name, field) in self._declared_fields.items():
            given = state[entry]
            if field.form is None:
                setattr(self, name, given)
            elif field.form.value is not None:
                setattr(self, name, field.form.of(given))
            elif given is not None and (part := getattr(self, name)) is not None:
                field.form.take_on(part, given)

    @classmethod
    def _declared_shares(cls, states: Sequence[Mapping[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        shares: list[dict[str, Any]] = [{} for _ in range(parallelism)]
        for entry, (name, field) in cls._declared_fields.items():
            if field.share is None:
                raise InternalError(f"{cls.__name__}.{name}: expected a share= of its declaration, given none")
            values: Iterable[Any] = field.share(entry, [state[entry] for state in states], parallelism)
            for share, value in zip(shares, values, strict=True):
                share[entry] = value
        return shares


class DeclaredState(_Declares):
    """A learner, or a part of an operator, whose state is its declared fields."""

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as plain data."""
        return self._declared_state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`."""
        self._take_on_declared(state)

    @classmethod
    def redistribute(cls, states: Sequence[Mapping[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Return the states of the new subtasks, as the fields' shares say."""
        return cls._declared_shares(states, parallelism)


class DeclaredOperator(_Declares, EngineOperator):
    """An operator whose state is its declared fields; it keeps its parallelism."""

    def snapshot(self) -> dict[str, Any]:
        return self._declared_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._take_on_declared(state)


class SharedOperator(DeclaredOperator):
    """An operator of declared fields that may get another parallelism: each field has a share."""

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Return the states of the new subtasks, as the fields' shares say."""
        return self._declared_shares(states, parallelism)
