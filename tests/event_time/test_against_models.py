"""Windows and joins against models that see all records at once.

The records of each side arrive out of order, but within the bound and the allowed lateness. Batches are cut anywhere:
an event-time watermark follows each batch, and precedes each record that it makes late. The instance resumes from its
state at any of these places.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from event_time.pure_runs import Kept
from operators.operator_harness import frozen
from support.examples import random_examples

from streamiter.operators.keyed_state import KeyedStates
from streamiter.operators.timed import ranges
from streamiter.operators.timed.aggregates import fold
from streamiter.operators.timed.as_of import AsOfJoin, AsOfWindow, Deduplication
from streamiter.operators.timed.joining import IntervalJoin, OneToOneJoin, WindowJoin
from streamiter.operators.timed.kinds import Hopping, Session, Sliding
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import AlignedWindows, make_windows
from streamiter.values.records import Columns
from streamiter.values.times import MAX_TIME, MIN_TIME

Arrival = tuple[str, str, int, int]
"""Side, key, time and value of a record; values are unique."""


@dataclass
class Example:
    """Records in the order of their arrival, and what happens between them."""

    kind: Any
    arrivals: list[Arrival]
    bound: int
    lateness: int
    cuts: set[int]
    restarts: set[int]
    choice: int

    def drive(
        self, make: Callable[[], Any], add: Callable[[Any, Arrival], object], backend: KeyedStates | None = None
    ) -> Kept:
        """Return the instance after all records; all that it emitted is in its ``results``."""
        kept, emitted = Kept(make, backend), list[Any]()
        reached = dict.fromkeys({side for side, *_ in self.arrivals}, MIN_TIME)

        def advance() -> None:
            # A side waits for the other, so it may be far ahead.
            kept.advance(min(reached.values()))

        for number, arrival in enumerate(self.arrivals):
            side, _, time, _ = arrival
            if number in self.cuts or time < reached[side]:
                advance()
            if number in self.restarts:
                emitted += kept.state.take_results()
                kept.restart(recounts=number % 2 == 0)
            kept.load(arrival[1])
            add(kept.state, arrival)
            reached[side] = max(reached[side], time - self.bound)
        kept.advance(MAX_TIME - 1)  # At the end itself nothing is dropped that a job which reads on may need.
        kept.advance(MAX_TIME)
        assert not kept.state.kept
        kept.state.results[:0] = emitted
        return kept


def some_arrivals(random: Random, sides: str, disorder: int) -> list[Arrival]:
    latest = random.choice([5, 80])
    times = sorted(random.randrange(-20, latest) for _ in range(random.randrange(25)))
    records = [(random.choice(sides), random.choice("ab"), time, number) for number, time in enumerate(times)]
    return sorted(records, key=lambda record: record[2] + random.randint(0, disorder))


def examples(sides: str, *kinds: Callable[[Random], Any], late: bool = False) -> Callable[[Random], Example]:
    def make(random: Random) -> Example:
        bound, lateness = random.choice([0, 3, 30]), random.choice([0, 4, 25]) if late else 0
        arrivals = some_arrivals(random, sides, bound + lateness)
        places = range(len(arrivals))
        return Example(
            random.choice(kinds)(random),
            arrivals,
            bound,
            lateness,
            {place for place in places if random.random() < 0.5},
            {place for place in places if random.random() < 0.2},
            random.randrange(12),
        )

    return make


def hopping(random: Random) -> Hopping:
    size = random.randint(1, 12)
    return Hopping(size, random.choice([size, random.randint(1, 14)]), random.randint(-5, 5))


def sliding(random: Random) -> Sliding:
    return Sliding(random.randint(1, 12))


def session(random: Random) -> Session:
    return Session(random.randint(1, 12))


LISTED = fold(list, lambda values, value: [*values, value], lambda earlier, later: earlier + later)
"""Like "collect", for records that are added by (time, arrival); long ranges merge it."""


@pytest.fixture(autouse=True)
def _few_records_are_a_long_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_FEWEST", 2)


Intervals = dict[tuple[str, int, int], list[Arrival]]


def windows_of(kind: Any, arrivals: list[Arrival]) -> Intervals:
    """Return the records of each key and window, by (time, arrival)."""
    found: Intervals = defaultdict(list)
    for key in sorted({arrival[1] for arrival in arrivals}):
        records = sorted((arrival for arrival in arrivals if arrival[1] == key), key=lambda arrival: arrival[2])
        for start, end in set(intervals_of(kind, [arrival[2] for arrival in records])):
            found[key, start, end] = [arrival for arrival in records if start <= arrival[2] < end]
    return found


def intervals_of(kind: Any, times: list[int]) -> Iterator[tuple[int, int]]:
    if isinstance(kind, Hopping):
        for time in times:
            for start in range(time - kind.size_ms + 1, time + 1):
                if (start - kind.offset_ms) % kind.step_ms == 0:
                    yield start, start + kind.size_ms
    elif isinstance(kind, Sliding):
        yield from ((time + 1 - kind.size_ms, time + 1) for time in times)
    else:
        start = 0
        for place, time in enumerate(times):
            if place == 0 or time - times[place - 1] >= kind.gap_ms:
                start = time
            if place == len(times) - 1 or times[place + 1] - time >= kind.gap_ms:
                yield start, time + kind.gap_ms


@random_examples(examples("x", hopping, sliding, session, late=True), fewest=20)
def test_the_results_that_stand_are_those_of_all_records(example: Example, backend: KeyedStates | None) -> None:
    listed: Any = LISTED if isinstance(example.kind, Sliding) else "collect"
    aggregates = Aggregates.of((), {"all": listed, "last": "last", "first": "first", "least": "min"})
    options = {
        "lateness_ms": example.lateness,
        "retracting": example.choice % 2,
        "gives_early": example.choice % 3 == 0,
    }

    def add(state: Any, arrival: Arrival) -> None:
        _, key, time, value = arrival
        if options["gives_early"] and value % 4 == 0:
            while not state.early():
                pass
        assert state.add(key, time, aggregates.values_of(value))

    kept = example.drive(lambda: make_windows(example.kind, aggregates, **options), add, backend)
    assert not kept.states()
    if isinstance(example.kind, Sliding):
        assert not kept.state._ranges._digests
    expected = {
        interval: {
            "all": (values := [value for *_, value in records]),
            "last": values[-1],
            "first": values[0],
            "least": min(values),
        }
        for interval, records in windows_of(example.kind, example.arrivals).items()
    }
    check_results(kept.state.results, expected, retracting=bool(example.choice % 2))


def check_results(results: list[Any], expected: dict[Any, Any], *, retracting: bool) -> None:
    """Each window has one value more than retractions of it, and exactly those values that stand are expected."""
    standing: dict[Any, Any] = {}
    revisions: dict[Any, int] = {}
    on_time = defaultdict(int)
    for result in results:
        interval = (result.key, result.start, result.end)
        if result.is_retraction:
            assert standing.pop(interval) == result.value
            assert revisions[interval] == result.revision
            continue
        assert not (retracting and interval in standing)
        assert revisions.get(interval, -1) < result.revision
        standing[interval], revisions[interval] = result.value, result.revision
        on_time[interval] += not result.is_early
    assert standing == expected
    assert all(on_time[interval] for interval in expected)


def beyond_the_bound(sides: str, *kinds: Callable[[Random], Any]) -> Callable[[Random], Example]:
    """Return a maker of examples with records that are later than the bound and the allowed lateness."""

    def make(random: Random) -> Example:
        example = examples(sides, *kinds, late=True)(random)
        arrivals = some_arrivals(random, sides, 30)
        places = range(len(arrivals))
        cuts, restarts = ({place for place in places if random.random() < share} for share in (0.5, 0.2))
        bound, lateness = random.choice([0, 3, 9]), random.choice([0, 4, 9])
        return replace(example, arrivals=arrivals, cuts=cuts, restarts=restarts, bound=bound, lateness=lateness)

    return make


@random_examples(beyond_the_bound("x", sliding), fewest=20)
def test_a_sliding_window_has_all_records_that_come_before_it_is_gone(
    example: Example, backend: KeyedStates | None
) -> None:
    """A record was late for its own window, and was lost for the others: a mean count was 70 instead of 236."""
    size, lateness = example.kind.size_ms, example.lateness
    aggregates = Aggregates.of((), {"all": LISTED})
    came: list[tuple[Arrival, int]] = []

    def add(state: Any, arrival: Arrival) -> None:
        _, key, time, value = arrival
        watermark = state.reached(key)
        is_late = time + size + lateness <= watermark
        assert state.add(key, time, aggregates.values_of(value)) is not is_late
        came.append((arrival, watermark))

    kept = example.drive(lambda: make_windows(example.kind, aggregates, lateness_ms=lateness), add, backend)
    assert not kept.states()
    expected = {}
    for (_, key, own, _), own_watermark in came:
        end = own + 1
        if end + lateness > own_watermark:
            records = [
                each
                for each, watermark in came
                if each[1] == key and end - size <= each[2] < end and end + lateness > watermark
            ]
            in_order = sorted(records, key=lambda each: each[2])
            expected[key, end - size, end] = {"all": [value for *_, value in in_order]}
    check_results(kept.state.results, expected, retracting=False)


@random_examples(beyond_the_bound("LR", hopping), fewest=20)
def test_a_window_join_has_all_records_that_come_before_the_window_is_complete(
    example: Example, backend: KeyedStates | None
) -> None:
    """A join dropped a record below the watermark, though its window was open, and an aggregate counted it."""
    came: list[tuple[Arrival, int]] = []

    def add(state: Any, arrival: Arrival) -> None:
        side, key, time, _ = arrival
        watermark = state.reached(key)
        ends = [end for _, end in example.kind.windows_of(time)]
        is_late = bool(ends) and max(ends) <= watermark
        assert state.add("left" if side == "L" else "right", key, time, arrival) is not is_late
        came.append((arrival, watermark))

    kept = example.drive(lambda: WindowJoin(example.kind), add, backend)
    expected: list[Any] = []
    for (key, start, end), _ in windows_of(example.kind, example.arrivals).items():
        records = [each for each, watermark in came if each[1] == key and start <= each[2] < end and end > watermark]
        expected += [(end - 1, (a, b)) for a in sides_of(records, "L") for b in sides_of(records, "R")]
    assert pairs_of(kept.state.results) == pairs_of(expected)


@random_examples(examples("x", hopping, sliding, session), fewest=20)
def test_final_results_do_not_depend_on_cuts_and_come_by_end(example: Example, backend: KeyedStates | None) -> None:
    aggregates = Aggregates.of(["collect"], {})

    def results(cuts: set[int]) -> list[Any]:
        example.cuts = cuts
        kept = example.drive(
            lambda: make_windows(example.kind, aggregates),
            lambda state, arrival: state.add(arrival[1], arrival[2], [arrival[3]]),
            backend,
        )
        emitted: list[Any] = kept.state.results
        return emitted

    cut = results(example.cuts)
    assert cut == results(set(range(len(example.arrivals))))
    assert [result.end for result in cut] == sorted(result.end for result in cut)


NUMBERS = [0, 1, -5, 2**62, 2**63 - 1, True, 0.1, -0.0, 1e300, float("nan"), float("inf"), float("-inf")]
TYPES = ["?", "i1", "u2", "i8", "u8", "f4", "f8"]
KEYS = {
    "i8": [3, 70_000, -7, 2**63 - 1],
    "i1": [-100, 100, 0],
    "u8": [3, 2**64 - 1, 2**64 - 2],
    "=i8": [2**63 - 1, 2**63 - 2],
    "U5": [3, 70_000],
    "list": [3, 70_000, "x"],
}


@dataclass
class ColumnBatch:
    keys: Any
    times: list[int]
    values: Any
    watermark: int


def some_columns(random: Random) -> tuple[Hopping, int, list[ColumnBatch]]:
    batches, latest = [], random.choice([100, 2**45])
    for _ in range(random.randrange(4)):
        length = random.randint(1, 12)
        with np.errstate(all="ignore"):
            values = np.array([random.choice(NUMBERS) for _ in range(length)], "f8").astype(random.choice(TYPES))
        dtype = random.choice(list(KEYS))
        keys = [random.choice(KEYS[dtype]) for _ in range(length)]
        times = [random.randrange(latest) for _ in range(length)]
        batches.append(
            ColumnBatch(
                keys if dtype == "list" else np.array(keys, dtype),
                times,
                values,
                random.choice([-1, random.randrange(90)]),
            )
        )
    return hopping(random), random.choice([0, 30]), batches


@random_examples(some_columns)
def test_columns_have_the_results_of_single_records_to_the_bit(example: tuple[Hopping, int, list[ColumnBatch]]) -> None:
    kind, lateness, batches = example
    aggregates = Aggregates.of(
        (),
        {"n": "count"} | {each: (each, "x") for each in ("sum", "mean", "min", "max")},  # type: ignore[arg-type]
    )
    options = {"lateness_ms": lateness, "gives_early": len(batches) % 2}
    in_columns, one_by_one = AlignedWindows(kind, aggregates, **options), AlignedWindows(kind, aggregates, **options)
    for batch in batches:
        columns = Columns({"x": batch.values})
        as_list = [{"x": value} for value in batch.values.tolist()]
        arrays = aggregates.columns_of(as_list if len(batch.values) % 2 else columns)
        assert arrays is not None or len(batch.values) % 2
        added = arrays is not None and in_columns.add_batch(batch.keys, np.array(batch.times), arrays)
        keys = batch.keys if isinstance(batch.keys, list) else batch.keys.tolist()
        for key, time, record in zip(keys, batch.times, columns, strict=True):
            one_by_one.add(key, time, aggregates.values_of(record))
            if not added:
                in_columns.add(key, time, aggregates.values_of(record))
        assert in_columns.kept == one_by_one.kept
        for state in (in_columns, one_by_one):
            state.early()
            state.advance(batch.watermark)
    for state in (in_columns, one_by_one):
        state.advance(MAX_TIME)
    in_full, expected = (
        [frozen([result.key, result.start, result.value, result.revision, result.is_early]) for result in state.results]
        for state in (in_columns, one_by_one)
    )
    assert in_full == expected


# -- joins -------------------------------------------------------------------------------------------------

HOW: Any = ["inner", "left", "right", "full"]


def pairs_of(results: list[Any]) -> list[Any]:
    return sorted(results, key=repr)


def sides_of(arrivals: list[Arrival], side: str) -> list[Arrival]:
    return [arrival for arrival in arrivals if arrival[0] == side]


def add_to_side(state: Any, arrival: Arrival) -> None:
    side, key, time, _ = arrival
    assert state.add("left" if side == "L" else "right", key, time, arrival)


def bounds(random: Random) -> tuple[int, int]:
    lower = random.randint(-12, 12)
    return lower, lower + random.randint(0, 8)


@random_examples(examples("LR", bounds), fewest=20)
def test_interval_joins_have_all_pairs_of_the_interval(example: Example, backend: KeyedStates | None) -> None:
    (lower, upper), how = example.kind, HOW[example.choice % 4]
    kept = example.drive(lambda: IntervalJoin(lower, upper, how), add_to_side, backend)
    left, right = sides_of(example.arrivals, "L"), sides_of(example.arrivals, "R")
    pairs = [(a, b) for a in left for b in right if a[1] == b[1] and a[2] + lower <= b[2] <= a[2] + upper]
    expected: list[Any] = [(max(a[2], b[2]), (a, b)) for a, b in pairs]
    if how in ("left", "full"):
        expected += [(a[2], (a, None)) for a in left if a not in [pair[0] for pair in pairs]]
    if how in ("right", "full"):
        expected += [(b[2], (None, b)) for b in right if b not in [pair[1] for pair in pairs]]
    assert pairs_of(kept.state.results) == pairs_of(expected)
    assert not kept.states()


@random_examples(examples("LR", bounds), fewest=20)
def test_no_result_of_an_interval_join_is_behind_its_event_time_watermark(
    example: Example, backend: KeyedStates | None
) -> None:
    (lower, upper), how = example.kind, HOW[example.choice % 4]
    passed_on = MIN_TIME

    def add(state: Any, arrival: Arrival) -> None:
        nonlocal passed_on
        passed_on = max(passed_on, state.watermark - state.held_back_ms())
        before = len(state.results)
        add_to_side(state, arrival)
        assert all(time >= passed_on for time, _ in state.results[before:])

    example.restarts = set()
    example.drive(lambda: IntervalJoin(lower, upper, how), add, backend)


class PlainOneToOne:
    """A one-to-one join of few records: a list of those that wait."""

    def __init__(self, lower: int, upper: int | None, kept_max: int | None, in_order: bool) -> None:
        self.lower, self.upper, self.kept_max, self.in_order = lower, upper, kept_max, in_order
        self.watermark, self.arrived = MIN_TIME, 0
        self.waiting: list[tuple[Any, ...]] = []
        self.results: list[Any] = []

    def add(self, state: Any, arrival: Arrival) -> None:
        side, key, time, _ = arrival
        self.watermark = state.watermark
        self.drop(lambda entry: entry[0] < self.watermark)
        self.arrived += 1
        is_right = side == "R"
        limit = time - self.lower if is_right else MAX_TIME - 1 if self.upper is None else time + self.upper
        for entry in self.waiting:
            left, right = (entry[3], arrival) if is_right else (arrival, entry[3])
            latest = MAX_TIME if self.upper is None else left[2] + self.upper
            if entry[1] != is_right and entry[3][1] == key and left[2] + self.lower <= right[2] <= latest:
                self.waiting.remove(entry)
                self.results.append((max(time, entry[3][2]), (left, right)))
                return
        same = [entry for entry in self.waiting if entry[1] == is_right and entry[3][1] == key]
        mine = (limit, is_right, self.arrived, arrival)
        if limit < self.watermark + self.in_order or any(entry[3][2] > time for entry in same):
            self.alone(mine)
            return
        self.drop(lambda entry: entry in same)
        self.waiting.append(mine)
        while self.kept_max is not None and len(self.waiting) > self.kept_max:
            first = min(self.waiting)
            self.drop(lambda entry, first=first: entry is first)  # type: ignore[misc]

    def drop(self, leaves: Callable[[Any], bool]) -> None:
        for entry in sorted(filter(leaves, self.waiting)):
            self.waiting.remove(entry)
            self.alone(entry)

    def alone(self, entry: tuple[Any, ...]) -> None:
        _, is_right, _, record = entry
        self.results.append((record[2], (None, record) if is_right else (record, None)))


@random_examples(examples("LR", bounds), fewest=20)
def test_one_to_one_joins_equal_a_list_of_waiting_records(example: Example, backend: KeyedStates | None) -> None:
    """An answer met a question that had been answered, or waited for one that was not the last of its key."""
    lower, upper = example.kind
    settings: Any = (
        lower,
        None if example.choice % 3 == 0 else upper,
        (None, 1, 4)[example.choice // 4 % 3],
        example.choice % 5 == 0,
    )
    plain = PlainOneToOne(*settings)

    def make() -> OneToOneJoin:
        return OneToOneJoin(*settings[:2], "full", kept_max=settings[2], in_order=settings[3])

    def add(state: Any, arrival: Arrival) -> None:
        plain.add(state, arrival)
        add_to_side(state, arrival)
        assert state.kept == len(plain.waiting)

    kept = example.drive(make, add, backend)
    plain.drop(lambda entry: True)
    assert kept.state.results == plain.results
    assert not kept.states()


def test_the_heap_of_a_one_to_one_join_does_not_grow_with_the_pairs() -> None:
    """Each question of a day was kept until the day was over, although its answer came in a second."""
    join = OneToOneJoin(0, 86_400_000)
    for n in range(10_000):
        join.add("left", n, n, n)
        join.add("right", n, n, n)
    assert len(join.results) == 10_000
    assert not join.kept
    assert len([*join._waiting.latest()]) <= 1_001


@random_examples(examples("LR", hopping, session), fewest=20)
def test_window_joins_have_all_pairs_of_each_window(example: Example, backend: KeyedStates | None) -> None:
    how = HOW[example.choice % 4]
    kept = example.drive(lambda: WindowJoin(example.kind, how), add_to_side, backend)
    expected: list[Any] = []
    for (_, _, end), records in windows_of(example.kind, example.arrivals).items():
        left: list[Any] = sides_of(records, "L") or [None] * (how in ("right", "full"))
        right: list[Any] = sides_of(records, "R") or [None] * (how in ("left", "full"))
        expected += [(end - 1, (a, b)) for a in left for b in right]
    assert pairs_of(kept.state.results) == pairs_of(expected)
    assert not kept.states()


@random_examples(examples("ST", bounds), fewest=20)
def test_a_record_is_joined_with_the_last_version_at_its_time(example: Example, backend: KeyedStates | None) -> None:
    strict, how = bool(example.choice % 2), HOW[example.choice % 4 // 2]

    def add(state: Any, arrival: Arrival) -> None:
        side, key, time, value = arrival
        if side == "T":
            state.add_version(key, time, value or None)
        else:
            assert state.add(key, time, arrival)

    kept = example.drive(lambda: AsOfJoin(how, strict=strict), add, backend)
    expected: list[Any] = []
    for record in sides_of(example.arrivals, "S"):
        versions = sorted(sides_of(example.arrivals, "T"), key=lambda version: version[2])
        known = [v[3] for v in versions if v[1] == record[1] and v[2] < record[2] + (not strict)]
        if (version := (known or [0])[-1] or None) is not None or how == "left":
            expected.append((record[2], (record, version)))
    assert pairs_of(kept.state.results) == pairs_of(expected)
    assert all(len(versions) == 1 and not waiting for versions, _, waiting in kept.states().values())


@random_examples(examples("SE", sliding), fewest=20)
def test_features_are_of_the_events_strictly_before_a_record(example: Example, backend: KeyedStates | None) -> None:
    size = example.kind.size_ms
    aggregates = Aggregates.of([LISTED], {})

    def add(state: Any, arrival: Arrival) -> None:
        side, key, time, value = arrival
        assert state.add_event(key, time, [value]) if side == "E" else state.add(key, time, arrival)

    kept = example.drive(lambda: AsOfWindow(size, aggregates), add, backend)
    events = sorted(sides_of(example.arrivals, "E"), key=lambda event: event[2])
    expected = [
        (time, (record, [e[3] for e in events if e[1] == key and time - size <= e[2] < time]))
        for record in sides_of(example.arrivals, "S")
        for _, key, time, _ in [record]
    ]
    assert pairs_of(kept.state.results) == pairs_of(expected)
    assert not kept.states()
    assert not kept.state._ranges._digests


@random_examples(examples("x", sliding), fewest=20)
def test_a_duplicate_is_dropped_whatever_arrives_first(example: Example, backend: KeyedStates | None) -> None:
    within, passed, expected = example.kind.size_ms, [], []

    def add(state: Any, arrival: Arrival) -> None:
        _, key, time, value = arrival
        passes = state.add(key, time, value % 3)
        assert passes is not None
        passed.extend([arrival] * passes)
        near = [e for e in expected if e[1] == key and e[3] % 3 == value % 3 and abs(e[2] - time) < within]
        expected.extend([] if near else [arrival])

    kept = example.drive(lambda: Deduplication(within), add, backend)
    assert passed == expected
    assert not kept.states()
