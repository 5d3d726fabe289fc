"""Runs windows and joins as pure data: each record, and then the event-time watermark that follows from it."""

from collections.abc import Callable, Iterable
from typing import Any
from zoneinfo import ZoneInfo

from event_time.cases import Action, Case, Record

from streamiter.operators.keyed_state import KeyedStates
from streamiter.operators.timed.as_of import AsOfJoin, Deduplication
from streamiter.operators.timed.joining import IntervalJoin
from streamiter.operators.timed.kinds import Calendar, Hopping, Session, Sliding, WindowKind
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import WindowResult, make_windows
from streamiter.values.plain_data import PlainData
from streamiter.values.times import MAX_TIME, MIN_TIME

PLAIN = PlainData([Record])


class Partitions:
    """The watermark of some partitions, as the engine computes it."""

    def __init__(self, names: Iterable[Any], bound: int = 0) -> None:
        self.reached: dict[Any, int] = dict.fromkeys(names, MIN_TIME)
        self.active = set(self.reached)
        self.bound = bound
        self.watermark = MIN_TIME

    def take(self, partition: Any, time: int) -> None:
        self.active.add(partition)
        self.reached[partition] = max(self.reached[partition], time - self.bound)
        self._update()

    def idle(self, partition: Any) -> None:
        self.active.discard(partition)
        self._update()

    def _update(self) -> None:
        reached = [self.reached[name] for name in self.active]
        self.watermark = max(self.watermark, min(reached) if reached else max(self.reached.values()))


def window_kind(case: Case) -> WindowKind | None:
    match case.kind, case.arguments:
        case "tumbling", (size,):
            return Hopping(int(size), int(size))
        case "tumbling", (size, offset):
            return Hopping(int(size), int(size), int(offset))
        case "hopping", (size, step):
            return Hopping(int(size), int(step))
        case "day", (zone,):
            return Calendar("day", ZoneInfo(zone))
        case "sliding", (size,):
            return Sliding(int(size))
        case "session", (gap,):
            return Session(int(gap))
    return None


def shown(result: WindowResult) -> str:
    """Return a result as cases have it."""
    early = ":e" if result.is_early else ""
    revision = f":r{result.revision}" if result.revision and not result.is_retraction else ""
    sign = "-" if result.is_retraction else ""
    return f"{sign}{result.key}[{result.start},{result.end})={result.value}{early}{revision}"


class Kept:
    """A pure state at work: in memory, or with the states of its keys in a backend, which is empty at first."""

    def __init__(self, make: Callable[[], Any], backend: KeyedStates | None) -> None:
        self._make = make
        self._backend = backend
        self.state: Any = make()
        if backend is not None:
            backend.clear()
            self.state.keep_in(backend)

    def load(self, key: Any) -> None:
        """Load the state of a key, before a record of it is added."""
        if self._backend is not None:
            self._backend.store()
            self._backend.load([key])

    def advance(self, watermark: int) -> None:
        self._finish(lambda: self.state.advance(watermark))

    def early(self) -> None:
        self._finish(self.state.early)

    def _finish(self, turn: Callable[[], bool]) -> None:
        if self._backend is not None:
            self._backend.store()
        while not turn():
            assert self._backend is not None
            self._backend.store()

    def restart(self, *, recounts: bool = False) -> None:
        """Resume in a new instance. ``recounts``: what follows from the states is computed again."""
        before, self.state = self.state, self._make()
        self.state.watermark = before.watermark
        if self._backend is None:
            self.state.restore(PLAIN.decode(PLAIN.encode(before.states)))
        else:
            self._backend.store()
            self._backend.summary = None if recounts else before.summary()
            self.state.keep_in(self._backend)
        assert self.state.kept == before.kept

    def states(self) -> dict[Any, Any]:
        """Return the states of all keys, at the end."""
        if self._backend is None:
            found: dict[Any, Any] = self.state.states
            return found
        self._backend.store()
        return {key: state for some in self._backend.all_without_due() for key, state in some.items()}


class Run:
    """A case at work: ``act`` returns what an action causes."""

    def __init__(self, case: Case, backend: KeyedStates | None) -> None:
        self.parts = Partitions(range(int(case.options.get("parts", 1))), int(case.options.get("bound", 0)))
        self.add: Callable[[Record], list[str]]
        self.taken: Callable[[], list[str]] = self._pairs
        if kind := window_kind(case):
            options = {
                "lateness_ms": int(case.options.get("late", 0)),
                "retracting": "retract" in case.options,
                "gives_early": any(action.name == "tick" for action in case.actions),
            }
            self.kept = Kept(lambda: make_windows(kind, Aggregates.of(["sum"], {}), **options), backend)
            self.add, self.taken = self._add_to_window, lambda: [*map(shown, self.state.take_results())]
        elif case.kind in ("inner", "left"):
            lower, upper = map(int, case.arguments)
            how: Any = case.kind
            self.kept = Kept(lambda: IntervalJoin(lower, upper, how), backend)
            self.add = self._add_to_join
            self.parts = Partitions("LR")
        elif case.kind == "asof":
            self.kept = Kept(lambda: AsOfJoin(strict="strict" in case.options), backend)
            self.add = self._add_to_table
            self.taken = lambda: [
                f"{record.key}@{record.time}={version}" for _, (record, version) in self.state.take_results()
            ]
            self.parts = Partitions("ST")
        else:
            self.kept = Kept(lambda: Deduplication(int(case.arguments[0])), backend)
            self.add, self.taken = self._add_to_deduplication, list

    @property
    def state(self) -> Any:
        return self.kept.state

    def act(self, action: Action) -> list[str]:
        if action.record is not None:
            self.kept.load(action.record.key)
            caused = self.add(action.record)
            self.parts.take(action.record.side or action.record.partition, action.record.time)
        elif action.name == "tick":
            self.kept.early()
            return self.taken()
        elif action.name == "idle":
            self.parts.idle(action.partition)
            caused = []
        else:
            assert action.name == "END"
            caused, self.parts.watermark = [], MAX_TIME
        self.kept.advance(self.parts.watermark)
        return caused + self.taken()

    def _add_to_window(self, record: Record) -> list[str]:
        return [] if self.state.add(record.key, record.time, [record.value]) else ["late"]

    def _add_to_join(self, record: Record) -> list[str]:
        side = "left" if record.side == "L" else "right"
        return [] if self.state.add(side, record.key, record.time, record) else ["late"]

    def _pairs(self) -> list[str]:
        def time(record: Record | None) -> Any:
            return "-" if record is None else record.time

        return [f"{(one or other).key}({time(one)},{time(other)})" for _, (one, other) in self.state.take_results()]

    def _add_to_table(self, record: Record) -> list[str]:
        if record.side == "T":
            self.state.add_version(record.key, record.time, record.value)
            return []
        return [] if self.state.add(record.key, record.time, record) else ["late"]

    def _add_to_deduplication(self, record: Record) -> list[str]:
        passes = self.state.add(record.key, record.time, record.value)
        return {True: [f"{record.key}@{record.time}={record.value}"], False: [], None: ["late"]}[passes]
