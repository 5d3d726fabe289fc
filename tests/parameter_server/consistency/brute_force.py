"""Reference implementation of the consistency table: each answer is computed from the complete history of calls.

It keeps no other state. It is slow, and is meant to be read together with the table of the three models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from streamiter.parameter_server.consistency import ASP, BSP, SSP, Consistency

Kind = Literal["start", "add", "get", "clock", "join", "raise", "leave", "forget", "restore"]
Verdict = Literal["now", "later", "unknown", "out of turn", "known", ""]

MODULUS = 1_000_003


def after_add(value: int, number: int) -> int:
    """Return the value of a one-number storage after this add; the result depends on the order of all changes."""
    return (value * 31 + number + 1) % MODULUS


def after_move(value: int, clock: int) -> int:
    """Return the value of the storage after its step at the end of an iteration."""
    return (value * 37 + clock) % MODULUS


@dataclass(frozen=True)
class Event:
    """One call that has reached the shard; its number is its index in the history."""

    kind: Kind
    worker: int = -1
    observed: int = -1
    workers: tuple[int, ...] = ()
    """The workers of a start event."""
    to: int = 0
    """The clock of a raise event, or the number of the get of a forget event."""


class Change(NamedTuple):
    """A change of the storage: an add, by its number, or the end of an iteration, by the clock that follows it."""

    kind: Literal["add", "move"]
    number: int


@dataclass
class Move:
    """A rise of the minimum clock to ``clock``, with the numbers of the adds and gets that it releases, in order."""

    clock: int
    adds: list[int]
    gets: list[int]


@dataclass
class Outcome:
    """The effects of one call."""

    verdict: Verdict
    moves: list[Move] = field(default_factory=list)
    values: dict[int, int] = field(default_factory=dict)
    """The value that each answered get reads, by the number of the get, in order."""
    orphaned: list[int] = field(default_factory=list)
    """The numbers of the adds that are applied because the last worker has left."""


class BruteForce:
    """The history of one matrix, and everything that is computed from it."""

    def __init__(self, consistency: Consistency, workers: Sequence[int]) -> None:
        self.consistency = consistency
        self.history: list[Event] = []
        self.verdicts: list[Verdict] = []
        self._progress: dict[tuple[int, int], int | None] = {}
        """The progress of a worker before an event, once computed; the past does not change."""
        self._min_clock: dict[int, int] = {}
        self.happen(Event("start", workers=tuple(workers)))

    # -- clocks ----------------------------------------------------------------------------------------

    def progress(self, worker: int, when: int | None = None) -> int | None:
        """Return how many iterations the worker has finished before event ``when``, or None where it takes no part."""
        end = len(self.history) if when is None else when
        if (worker, end) not in self._progress:
            self._progress[worker, end] = self._count_progress(worker, end)
        return self._progress[worker, end]

    def _count_progress(self, worker: int, end: int) -> int | None:
        clock: int | None = None
        for number, event in enumerate(self.history[:end]):
            if event.kind == "start":
                clock = 0 if worker in event.workers else None
            elif event.worker == worker and self.verdicts[number] == "now":
                if event.kind == "join":
                    clock = self.min_clock(number)
                elif event.kind == "leave":
                    clock = None
                elif event.kind == "raise" and clock is not None:
                    clock = max(clock, event.to)
                elif event.kind == "clock" and clock is not None:
                    clock += 1
        return clock

    def min_clock(self, when: int | None = None) -> int:
        """Return the lowest progress of all workers, or the last minimum clock while no worker takes part."""
        end = len(self.history) if when is None else when
        if end not in self._min_clock:
            self._min_clock[end] = self._find_min_clock(end)
        return self._min_clock[end]

    def _find_min_clock(self, end: int) -> int:
        everybody = {worker for event in self.history[:end] for worker in (event.worker, *event.workers)}
        clocks = [clock for worker in everybody if (clock := self.progress(worker, end)) is not None]
        if clocks:
            return min(clocks)
        if not end or self.history[end - 1].kind == "start":
            return 0
        return max(self.min_clock(end - 1), self._furthest(end))

    def _furthest(self, end: int) -> int:
        """Return the highest clock of any worker since the start; without workers, all iterations up to it are
        complete.
        """
        start = max([0, *(number for number in range(end) if self.history[number].kind == "start")])
        everybody = {event.worker for event in self.history[:end]} | {
            worker for event in self.history[:end] for worker in event.workers
        }
        return max(
            (self.progress(worker, when) or 0 for worker in everybody for when in range(start + 1, end)), default=0
        )

    def _nobody_takes_part(self, end: int) -> bool:
        everybody = {worker for event in self.history[:end] for worker in (event.worker, *event.workers)}
        return all(self.progress(worker, end) is None for worker in everybody)

    def _departures_of_all(self, when: int) -> int:
        """Return how often the last worker has left between the start and event ``when``."""
        return sum(
            self.history[number].kind == "leave" and self._nobody_takes_part(number + 1)
            for number in range(self._start(), when)
        )

    def orphaned_adds(self, when: int | None = None) -> list[int]:
        """Return the adds of the unfinished iteration that were applied before ``when`` as the last worker left."""
        end = len(self.history) if when is None else when
        departures = self._departures_of_all(end)
        return [number for number in self._adds_at(self.min_clock(end)) if self._departures_of_all(number) < departures]

    def _start(self) -> int:
        return max(number for number, event in enumerate(self.history) if event.kind == "start")

    # -- the table -------------------------------------------------------------------------------------

    def happen(self, event: Event) -> Outcome:
        """Record the next call and return its effects."""
        number = len(self.history)
        verdict = self._verdict(event)
        self.history.append(event)
        self.verdicts.append(verdict)
        outcome = Outcome(verdict)
        if event.kind == "start":
            return outcome
        if event.kind == "get" and verdict == "now":
            outcome.values[number] = self.value_read(number, number)
        for clock in range(self.min_clock(number) + 1, self.min_clock() + 1):
            applied = self.orphaned_adds(number) if clock == self.min_clock(number) + 1 else []
            adds = [add for add in self._adds_at(clock - 1) if add not in applied]
            move = Move(clock, adds, self._gets_waiting_for(clock))
            outcome.moves.append(move)
            for get in move.gets:
                outcome.values[get] = self.value_read(get, number, clock)
        if self._departures_of_all(number + 1) > self._departures_of_all(number):
            before = self.orphaned_adds(number) if self.min_clock(number) == self.min_clock() else []
            outcome.orphaned = [add for add in self.orphaned_adds() if add not in before]
        return outcome

    def _verdict(self, event: Event) -> Verdict:
        if event.kind in ("start", "forget", "restore"):
            return "now"
        clock = self.progress(event.worker)
        if event.kind == "join":
            return "now" if clock is None else "known"
        if clock is None:
            return "unknown"
        here = self.min_clock()
        anywhere = max(here, event.observed)
        match self.consistency, event.kind:
            case BSP(), "add":
                return "later" if clock <= anywhere else "out of turn"
            case BSP(), "clock":
                return "now" if clock + 1 <= anywhere + 1 else "out of turn"
            case BSP(), "get":
                if clock > anywhere + 1:
                    return "out of turn"
                return "now" if clock == here else "later"
            case SSP(staleness), "get":
                return "later" if clock > here + staleness else "now"
        return "now"

    # -- waiting calls ---------------------------------------------------------------------------------

    def _adds_at(self, clock: int) -> list[int]:
        """Return the adds buffered at this clock, in the order of their workers."""
        if self.consistency != BSP():
            return []
        adds = [
            number
            for number in self._numbers("add")
            if self.verdicts[number] == "later" and self.progress(self.history[number].worker, number) == clock
        ]
        return sorted(adds, key=lambda number: (self._departures_of_all(number), self.history[number].worker, number))

    def pending_adds(self, worker: int | None = None) -> list[int]:
        """Return the adds that have not been applied, in no particular order."""
        latest = max([self.min_clock(), *(self.progress(e.worker, n) or 0 for n, e in enumerate(self.history))])
        applied = self.orphaned_adds()
        return [
            number
            for clock in range(self.min_clock(), latest + 1)
            for number in self._adds_at(clock)
            if number not in applied and (worker is None or self.history[number].worker == worker)
        ]

    def wanted(self, get: int) -> int:
        """Return the minimum clock that a get waits for."""
        clock = self.progress(self.history[get].worker, get)
        assert clock is not None
        return clock - self.consistency.staleness if isinstance(self.consistency, SSP) else clock

    def _gets_waiting_for(self, clock: int) -> list[int]:
        restores = self._numbers("restore")
        forgotten = [self.history[number].to for number in self._numbers("forget")]
        return [
            number
            for number in self._numbers("get")
            if self.verdicts[number] == "later"
            and self.wanted(number) == clock
            and number not in forgotten
            and not any(restore > number for restore in restores)
        ]

    def waiting_gets(self) -> list[int]:
        """Return the gets that have not been answered, in order of arrival."""
        latest = max([0, *(self.wanted(n) for n in self._numbers("get") if self.verdicts[n] == "later")])
        here = self.min_clock()
        return sorted(n for clock in range(here + 1, latest + 1) for n in self._gets_waiting_for(clock))

    def _numbers(self, kind: Kind) -> list[int]:
        start = self._start()
        return [n for n, event in enumerate(self.history) if n >= start and event.kind == kind]

    # -- values read -----------------------------------------------------------------------------------

    def value_read(self, get: int, when: int, clock: int | None = None) -> int:
        """Return the number that a get reads; the arguments are those of ``changes_read``."""
        value = 0
        for change in self.changes_read(get, when, clock):
            change_value = after_add if change.kind == "add" else after_move
            value = change_value(value, change.number)
        return value

    def changes_read(self, get: int, when: int, clock: int | None = None) -> list[Change]:
        """Return the changes seen by a get that is answered in event ``when``, with the minimum clock at ``clock``."""
        if (
            self.consistency == BSP()
        ):  # all adds of the iterations before its own, and orphaned adds of its own iteration
            own = self.progress(self.history[get].worker, get)
            assert own is not None
            orphaned = self.orphaned_adds(get) if own == self.min_clock(get) else []
            return [*self._finished(own), *(Change("add", number) for number in orphaned)]
        return self._arrived(when, clock)

    def changes_applied(self) -> list[Change]:
        """Return all changes of the storage up to now."""
        if self.consistency == BSP():
            orphaned = (Change("add", number) for number in self.orphaned_adds())
            return [*self._finished(self.min_clock()), *orphaned]
        return self._arrived(len(self.history) - 1, None)

    def _finished(self, clock: int) -> list[Change]:
        """Return the changes of the first ``clock`` iterations, under BSP."""
        return [
            change
            for passed in range(1, clock + 1)
            for change in (*(Change("add", n) for n in self._adds_at(passed - 1)), Change("move", passed))
        ]

    def _arrived(self, when: int, clock: int | None) -> list[Change]:
        """Return the changes in the order of events, under ASP and SSP; of ``when`` only those up to ``clock``."""
        changes = []
        for number in range(self._start() + 1, when + 1):
            before, after = self.min_clock(number), self.min_clock(number + 1)
            if self.history[number].kind == "add" and self.verdicts[number] == "now":
                changes.append(Change("add", number))
            if number == when and clock is not None:
                after = clock
            changes += [Change("move", passed) for passed in range(before + 1, after + 1)]
        return changes


KINDS = (ASP(), BSP(), SSP(0), SSP(1), SSP(2), SSP(3))
