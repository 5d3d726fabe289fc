"""The order in which a task handles what its ports bring. Pure functions and data, no I/O.

What waits at a port has the key (epoch, arrival). Records have their epoch. A control record that must not act before
the records in front of it is a *mark*: :class:`Marks` keeps the marks of one port, and says which of them act now.

An :class:`InboxOrder` says whether a record waits for the turn of its epoch, and whether for the turn of its port:

``ARRIVAL``
    ports take turns, and records are handled as they arrive
``BY_EPOCH``
    the same, but records of later epochs are set aside until the turn of their epoch
``BY_EPOCH_THEN_PORT``
    the records with the lowest (epoch, port) come first, so that the order does not depend on the speed of tasks

Two orders are subtle. First, event time and epochs at one port. An event-time watermark acts after the records that
arrived before it, whatever their epoch, and never before the epoch watermark in front of it:

>>> from streamiter.values.records import EventTimeWatermark
>>> marks = Marks()
>>> marks.add(EpochWatermark(5), highest=3), marks.add(EventTimeWatermark(70), highest=3)
(None, None)
>>> [marks.take(lowest=3), marks.take(lowest=None), marks.take(lowest=None)]
[None, EpochWatermark(5), EventTimeWatermark(70)]

Second, the end of data takes its turn like a record, so that a synchronous loop with several inputs ends at the same
place in each run. If port 1 has brought its end, port 0 has the lower place, until its epoch 0 is complete:

>>> from types import SimpleNamespace as Waiting
>>> ports = [Waiting(index=0, input_name="a", lowest=None), Waiting(index=1, input_name="b", lowest=None)]
>>> epochs = Frontier([0, 1], BEFORE_ALL_EPOCHS)
>>> next_port(ports, None, epochs).input_name
'a'
>>> epochs.reach(0, 0), epochs.settle(), next_port(ports, None, epochs).input_name
(None, False, 'b')
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, final

from streamiter.errors import ConfigurationError
from streamiter.operators.frontier import Frontier
from streamiter.values.records import WATERMARKS, Control, EndOfData, EpochWatermark

BEFORE_ALL_EPOCHS: Final = -1
"""The watermark of a channel that has brought none."""


@final
@dataclass(frozen=True)
class InboxOrder:
    """The order in which an inbox hands over records."""

    sets_aside: bool = False
    """Whether a record is set aside that has no turn, because its epoch is a later one or its input is not wanted.

    The end of the wanted input's epoch may be behind records that are not wanted: in a head that brings both inputs, or
    because all initial variables and data must end before any head continues. So these are read, too.
    """
    by_port: bool = False
    """Whether the order of ports is fixed: the port that :func:`next_port` returns is next, whichever has records."""


ARRIVAL: Final = InboxOrder()
BY_EPOCH: Final = InboxOrder(sets_aside=True)
BY_EPOCH_THEN_PORT: Final = InboxOrder(sets_aside=True, by_port=True)


class WaitingPort(Protocol):
    """A port, as far as its order depends on it."""

    @property
    def index(self) -> int: ...
    @property
    def input_name(self) -> str: ...
    @property
    def lowest(self) -> int | None:
        """The lowest epoch of its records that are set aside; None if there are none."""


P = TypeVar("P", bound=WaitingPort)
WantedNames = frozenset[str] | None
"""The wanted inputs; None for all."""


def next_port(ports: Sequence[P], wanted: WantedNames, epochs: Frontier[int]) -> P | None:
    """Return the port whose record, or the end of whose data, comes next; None if all data has ended.

    The *place* of a port is the last epoch that it has brought and that the task has handled, then its number. The port
    with the lowest place is next. Decision 024 explains why a loop with such an order does not stand still.

    Wanted inputs come first: a record that waits at a port whose input is not wanted has no turn. Such a port without a
    record may bring a watermark. If that may be of an earlier epoch, the port is next, so that the callback of that
    epoch has a fixed place. If no input is wanted, a record that waits keeps its turn.

    >>> from types import SimpleNamespace as Waiting
    >>> ports = [Waiting(index=0, input_name="examples", lowest=0), Waiting(index=1, input_name="model", lowest=None)]
    >>> epochs = Frontier([0, 1], BEFORE_ALL_EPOCHS)
    >>> [next_port(ports, wanted, epochs).index for wanted in (None, frozenset({"model"}))]
    [0, 1]
    """
    if wanted is None:
        return None if epochs.slowest is None else ports[epochs.slowest]
    following, lowest = None, (math.inf, True, 0)
    for port in ports:
        if epochs.has_ended(port.index):
            continue
        reached = epochs.reached(port.index)
        is_wanted = port.input_name in wanted
        place = reached, not is_wanted, port.index
        if place < lowest and (is_wanted or not wanted or port.lowest != reached + 1):
            following, lowest = port, place
    return following


@final
class Marks:
    """The control records of one port that wait for the records in front of them, by (epoch, arrival).

    An epoch watermark is behind the records of its epoch, and the end of the data behind everything, also behind
    records that arrive after it. Any other mark is behind everything that had arrived before it, as the first example
    of this page shows.

    >>> marks = Marks()
    >>> marks.add(EndOfData(4), highest=3), marks.add(EpochWatermark(5), highest=3)
    (None, None)
    >>> [marks.take(lowest=6), marks.take(lowest=6), marks.take(None, but_end=True), marks.take(None)]
    [EpochWatermark(5), None, None, EndOfData(4)]
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Control]] = []
        """The marks with their epochs, without the end of the data. Others only read it."""
        self.end: EndOfData | None = None
        """The end of the data, if it waits. Others only read it."""

    def __bool__(self) -> bool:
        return bool(self.waiting) or self.end is not None

    def add(self, mark: Control, highest: int) -> None:
        """Add a mark behind the records that wait; ``highest`` is their highest epoch.

        A watermark replaces one of its kind if nothing is between the two. The first end of the data counts.
        """
        if isinstance(mark, EndOfData):
            self.end = self.end or mark
            return
        waiting = self.waiting
        epoch = max([highest, *(before for before, _ in waiting[-1:])])
        if isinstance(mark, EpochWatermark):
            epoch = mark.epoch
        if waiting and type(waiting[-1][1]) is type(mark) and isinstance(mark, WATERMARKS):
            before = waiting[-1][0]
            if before == epoch or highest <= before:
                waiting.pop()
        insort(waiting, (epoch, mark), key=lambda each: each[0])

    def take(self, lowest: int | None, *, but_end: bool = False) -> Control | None:
        """Take the first mark that acts now; ``lowest`` is the lowest epoch of the records that wait.

        With ``but_end``, the end of the data stays: it waits for the turn of its port.
        """
        if self.waiting:
            return self.waiting.pop(0)[1] if lowest is None or self.waiting[0][0] < lowest else None
        if lowest is not None or but_end:
            return None
        end, self.end = self.end, None
        return end

    def snapshot(self) -> list[Control]:
        """Return the marks of epochs, then the end of the data: each step announces its event time again.

        An end of the data that only the end of the input has brought comes with that end again.
        """
        kept: list[Control] = [mark for _, mark in self.waiting if isinstance(mark, EpochWatermark)]
        return kept if self.end is None or self.end.epoch == BEFORE_ALL_EPOCHS else [*kept, self.end]


@final
class WantedInputs:
    """The inputs that an operator wants to read next, as ``wanted_inputs()`` returned them last.

    If all inputs that it names have ended, all inputs are wanted.
    """

    def __init__(self, ports: Sequence[P], has_ended: Callable[[P], bool]) -> None:
        self._inputs = dict.fromkeys(port.input_name for port in ports)
        self._has_ended: Callable[[str], bool] = lambda name: all(
            has_ended(port) for port in ports if port.input_name == name
        )
        self._asked_for: tuple[str, ...] | None = None
        self.names: WantedNames = None
        """The inputs to read now, or None for all."""

    def ask(self, input_names: Iterable[str] | None) -> bool:
        """Want only these inputs from now on, or all (None); return whether this changes the request.

        Raises ConfigurationError if the value is not a collection of names, or no input has one of the names.
        """
        try:
            asked_for = None if input_names is None else tuple(input_names)
        except TypeError:
            raise _no_names(input_names) from None
        if asked_for == self._asked_for:
            return False
        if isinstance(input_names, str):
            raise _no_names(input_names)
        if unknown := [name for name in asked_for or () if name not in self._inputs]:
            raise ConfigurationError(
                f"wanted_inputs(): expected names of inputs ({', '.join(self._inputs)}), given {unknown[0]!r}; "
                "return a tuple of them, or None for all"
            )
        self._asked_for, self.names = asked_for, None
        self.reconsider()
        return True

    def reconsider(self) -> bool:
        """Decide again after a port has ended; return whether the wanted inputs may have changed."""
        if (asked_for := self._asked_for) is None:
            return False
        have_ended = asked_for and all(map(self._has_ended, asked_for))
        self.names = None if have_ended else frozenset(asked_for)
        return True


def _no_names(given: object) -> ConfigurationError:
    return ConfigurationError(
        f"wanted_inputs(): expected a tuple or list of names, given {given!r}; "
        f"{f'return ({given!r},)' if isinstance(given, str) else 'return None for all inputs'}"
    )
