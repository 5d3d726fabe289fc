"""The kinds of windows, the days, weeks and months of time zones, and values that are read as timestamps."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from fractions import Fraction
from random import Random
from typing import Any, get_args
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from support.examples import random_examples

from streamiter import calendar, hopping, session, sliding, tumbling
from streamiter.errors import ConfigurationError
from streamiter.operators.timed.kinds import Calendar, CalendarUnit, Hopping, Session, Sliding
from streamiter.values.times import MAX_TIME, TIME_LIMIT, duration_ms, read_times, shown_time, unit_of

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000

CHANGES = {
    "Europe/Berlin": ["2026-03-29T01:00", "2026-10-25T01:00"],
    "America/Sao_Paulo": [
        "2017-10-15T03:00",
        "2018-02-18T02:00",
    ],  # Clocks change at midnight, to before and behind it.
    "America/St_Johns": ["2006-04-02T03:31", "2006-10-29T02:31"],  # A minute after midnight, to the day before.
    "America/Toronto": ["1919-03-31T04:30"],  # From 23:30 to 00:30: midnight was left out.
    "America/Havana": ["2024-03-10T05:00", "2024-11-03T05:00"],
    "Asia/Beirut": ["2022-03-26T22:00", "2022-10-29T21:00"],
    "Pacific/Apia": ["2011-12-30T10:00"],  # There was no 30 December.
    "Pacific/Kwajalein": ["1993-08-21T12:00"],
    "Australia/Lord_Howe": ["2024-04-06T15:00", "2024-10-05T15:30"],
    "UTC": ["2026-01-01T00:00"],
}


def milliseconds(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def group(unit: CalendarUnit, zone: ZoneInfo, time: int) -> date:
    """Return the first date of the day, week or month that a clock in this zone shows."""
    day = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time)).astimezone(zone).date()
    weeks = {"day": day, "week": day - timedelta(days=day.isoweekday() - 1), "month": day.replace(day=1)}
    return weeks[unit]


def some_times(random: Random) -> tuple[CalendarUnit, str, list[int]]:
    name = random.choice(list(CHANGES))
    change = milliseconds(random.choice(CHANGES[name]))
    spread = random.choice([MINUTE, 3 * HOUR, 3 * DAY, 40 * DAY])
    times = [change + random.randint(-spread, spread) for _ in range(3)]
    return random.choice(get_args(CalendarUnit)), name, times


@random_examples(some_times)
def test_a_window_of_the_calendar_is_from_the_first_instant_of_its_date_to_that_of_the_next(
    example: tuple[CalendarUnit, str, list[int]],
) -> None:
    unit, name, times = example
    kind, zone = calendar(unit, name), ZoneInfo(name)
    for time in times:
        [(start, end)] = kind.windows_of(time)
        assert start <= time < end
        own = group(unit, zone, start)
        # Clocks change at whole minutes, or long ago at whole seconds.
        around = [
            edge + sign * step for edge in (start, end) for sign in (-1, 1) for step in (1, MINUTE, HOUR, 3 * HOUR)
        ]
        for instant in [*around, *range(start, end, 12 * HOUR), time, end]:
            shown = group(unit, zone, instant)
            assert (shown < own) if instant < start else (shown <= own if instant < end else True)
        assert group(unit, zone, end) > own
        assert kind.windows_of(start) == kind.windows_of(end - 1) == [(start, end)]
        assert kind.windows_of(end)[0][0] == end
        assert kind.windows_of(start - 1)[0][1] == start


HOURS = {
    ("day", "Europe/Berlin", "2026-03-29T12:00"): ("2026-03-28T23:00", 23),
    ("day", "Europe/Berlin", "2026-10-25T12:00"): ("2026-10-24T22:00", 25),
    ("week", "UTC", "2026-11-29T12:00"): ("2026-11-23T00:00", 7 * 24),
    ("week", "Europe/Berlin", "2026-03-29T12:00"): ("2026-03-22T23:00", 7 * 24 - 1),
    ("month", "UTC", "2024-02-29T12:00"): ("2024-02-01T00:00", 29 * 24),
    ("month", "UTC", "2026-12-31T12:00"): ("2026-12-01T00:00", 31 * 24),
    # At midnight the clock went on to 01:00, or back to 23:00 of the day before, which is one day with it.
    ("day", "America/Sao_Paulo", "2017-10-15T12:00"): ("2017-10-15T03:00", 23),
    ("day", "America/Sao_Paulo", "2018-02-18T02:30"): ("2018-02-17T02:00", 25),
    ("day", "America/St_Johns", "2006-10-29T02:29"): ("2006-10-28T02:30", 24),
    ("day", "America/St_Johns", "2006-10-29T02:45"): ("2006-10-29T02:30", 25),
    ("day", "America/Toronto", "1919-03-31T04:29"): ("1919-03-30T05:00", 23.5),
    ("day", "America/Toronto", "1919-03-31T04:30"): ("1919-03-31T04:30", 23.5),
    ("day", "Pacific/Apia", "2011-12-30T09:59"): ("2011-12-29T10:00", 24),
    ("day", "Pacific/Apia", "2011-12-30T10:00"): ("2011-12-30T10:00", 24),
}


@pytest.mark.parametrize(("unit", "zone", "within"), HOURS, ids=lambda value: str(value).replace(":", ""))
def test_days_weeks_and_months_have_the_hours_of_their_time_zone(unit: Any, zone: str, within: str) -> None:
    start, hours = HOURS[unit, zone, within]
    begin = milliseconds(start)
    assert calendar(unit, zone).windows_of(milliseconds(within)) == [(begin, begin + hours * HOUR)]


def test_a_time_without_a_date_is_refused() -> None:
    kind = calendar("day", "UTC")
    with pytest.raises(ValueError, match=r"^calendar window: expected a time in the years 2 to 9998, given 4611686018"):
        kind.windows_of(2**62 - 1)
    assert kind.windows_of(5) == [(0, DAY)]


def test_seconds_of_users_are_milliseconds() -> None:
    assert tumbling(10) == Hopping(10_000, 10_000, 0)
    assert tumbling(0.001, offset_s=-0.5) == Hopping(1, 1, -500)
    assert hopping(10, 2.5) == Hopping(10_000, 2_500, 0)
    assert hopping(0.001, 0.001, offset_s=1e12) == Hopping(1, 1, 10**15)
    assert (sliding(0.001), session(0.001)) == (Sliding(1), Session(1))
    assert calendar("week", "UTC") == Calendar("week", ZoneInfo("UTC"))


WRONG: dict[str, Callable[[], Any]] = {
    "tumbling(size_s): expected seconds of at least 0.001": lambda: tumbling(0),
    "tumbling(offset_s): expected seconds, in whole": lambda: tumbling(1, "x"),  # type: ignore[arg-type]
    "hopping(size_s): expected seconds of at least 0.001": lambda: hopping(0, 1),
    "hopping(step_s): expected seconds of at least 0.001": lambda: hopping(1, 0),
    "hopping(offset_s): expected seconds, in whole": lambda: hopping(1, 1, float("nan")),
    "sliding(size_s): expected seconds of at least 0.001": lambda: sliding(0),
    "session(gap_s): expected seconds of at least 0.001": lambda: session(0),
    'calendar(unit): expected "day", "week" or "month", given \'year\'; choose one': lambda: calendar("year", "UTC"),  # type: ignore[arg-type]
    "calendar(time_zone): expected the name of a time zone such as 'Europe/Berlin', given 'Mars'; on a machine without "
    "time zones install tzdata": lambda: calendar("day", "Mars"),
}


@pytest.mark.parametrize("message", WRONG, ids=lambda message: message.partition(":")[0])
def test_a_wrong_window_is_refused(message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        WRONG[message]()
    assert str(refused.value).startswith(message)


BERLIN = ZoneInfo("Europe/Berlin")
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def numbers(random: Random) -> tuple[str, list[int]]:
    bits = random.choice([8, 31, 45, 62, 63, 70])
    return random.choice(list(PER_SECOND)), [random.randint(-(1 << bits), 1 << bits) for _ in range(5)]


@random_examples(numbers)
def test_whole_numbers_are_read_exactly_and_downwards(example: tuple[str, list[int]]) -> None:
    unit, values = example
    expected = [value * 1000 // PER_SECOND[unit] for value in values]
    is_good = [-TIME_LIMIT < time < TIME_LIMIT for time in expected]
    batches = [values, [*values, "x"]]
    if all(-(2**63) <= value < 2**63 for value in values):
        batches += [np.array(values), np.array(values, ">i8"), [np.int64(value) for value in values]]
    if all(0 <= value < 2**64 for value in values):
        batches.append(np.array(values, np.uint64))
    for batch in batches:
        times, failures = read_times(batch, unit)
        assert [index not in failures for index in range(5)] == is_good
        assert [time for time, good in zip(times.tolist()[:5], is_good, strict=True) if good] == [
            time for time, good in zip(expected, is_good, strict=True) if good
        ]


def seconds(random: Random) -> list[float]:
    # Around the borders of milliseconds, where a fraction must not be rounded up.
    near = random.randint(-(10**13), 10**13) / 1000 + random.choice([0, -5e-7, 5e-7, -1e-6, 4.999e-7, random.random()])
    return [near, np.nextafter(near, -np.inf), np.nextafter(near, np.inf), random.uniform(-1e12, 1e12), random.random()]


@random_examples(seconds)
def test_floats_are_read_to_the_nearest_microsecond_and_then_downwards(values: list[float]) -> None:
    expected = [round(Fraction(value) * 10**6) // 1000 for value in map(float, values)]
    for batch in (values, np.array(values), [*values, None]):
        assert read_times(batch, "s")[0].tolist()[:5] == expected


def moments(random: Random) -> tuple[str, list[int]]:
    unit = random.choice(["D", "h", "m", "s", "ms", "us", "ns", "ps", "10s", "W", "M", "Y"])
    return unit, [random.randint(-(10**6), 10**6) for _ in range(4)]


@random_examples(moments)
def test_datetime64_of_any_unit_is_utc(example: tuple[str, list[int]]) -> None:
    unit, ticks = example
    values = np.array([f"{tick}" for tick in ticks], "i8").view(f"M8[{unit}]")
    expected = [_floor_ms(value) for value in values]
    for batch in (values, list(values), values.astype(values.dtype.newbyteorder(">"))):
        assert read_times(batch)[0].tolist() == expected


def _floor_ms(value: np.datetime64) -> int:
    name, count = np.datetime_data(value.dtype)
    if name in ("W", "M", "Y"):
        return int(value.astype("M8[ms]").astype(np.int64))
    seconds_of = {"D": Fraction(86400), "h": Fraction(3600), "m": Fraction(60), "ps": Fraction(1, 10**12)}
    scale = seconds_of.get(name) or Fraction(1, PER_SECOND[name])
    return int(Fraction(int(value.astype(np.int64)) * count) * scale * 1000 // 1)


def test_datetimes_are_instants_and_fold_decides() -> None:
    aware = datetime(2026, 3, 28, 23, 30, 0, 999_999, tzinfo=UTC)
    winter = datetime(2026, 10, 25, 2, 30, fold=1)
    batch = [aware, aware.astimezone(timezone(timedelta(hours=5))), winter, winter.replace(fold=0), pd.Timestamp(aware)]
    times, failures = read_times(batch, time_zone=BERLIN)
    expected = int(aware.timestamp() * 1000)
    assert not failures
    assert times.tolist() == [expected, expected, 1792891800000, 1792888200000, expected]
    texts = [moment.isoformat() for moment in (aware, winter)] + ["2026-03-28T23:30:00.999Z"]
    assert read_times(texts, "iso", BERLIN)[0].tolist() == [expected, 1792888200000, expected]


BAD = [None, float("nan"), float("inf"), np.datetime64("NaT"), True, np.bool_(True), {}, "x", pd.NaT, TIME_LIMIT, 1.0]


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_a_value_that_is_no_time_is_refused_by_itself(value: object) -> None:
    if isinstance(value, np.datetime64):
        times, failures = read_times([value])
        assert failures == {0: "expected a time, given NaT"}
        return
    times, failures = read_times([5, value, 7], "ms")
    assert times[[0, 2]].tolist() == [5, 7]
    assert list(failures) == [1]
    assert failures[1].startswith("expected a time")


def test_bad_values_of_arrays_are_refused_one_by_one() -> None:
    assert list(read_times(np.array([1.0, np.nan, np.inf, 1e30]), "s")[1]) == [1, 2, 3]
    assert list(read_times(np.array(["2026", "NaT"], "M8[s]"))[1]) == [1]
    assert list(read_times(np.array([True, False]), "s")[1]) == [0, 1]
    assert list(read_times(np.array([1.0]), "ms")[1]) == [0]
    assert list(read_times([5], "iso")[1]) == [0]


@pytest.mark.parametrize(
    ("values", "unit", "zone", "message"),
    [
        ([1], None, None, 'event_time: expected unit= for whole numbers, given 1 without; write unit="s"'),
        (np.array([1]), None, None, "event_time: expected unit= for whole numbers"),
        (
            [datetime(2026, 1, 1)],
            None,
            None,
            "event_time: expected dates with a time zone, given '2026-01-01 00:00:00'",
        ),
        (np.array([1], "M8[s]"), "s", None, "event_time: expected no unit= for values of datetime64"),
        ([np.datetime64(1, "s")], None, BERLIN, "event_time: expected no time_zone= for values of datetime64"),
    ],
)
def test_a_missing_option_is_an_error_of_the_flow(values: object, unit: str, zone: ZoneInfo, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_times(values, unit, zone)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_a_wrong_unit_is_recognised_by_the_year() -> None:
    assert [unit_of(1_700_000_000 * PER_SECOND[unit], "s") for unit in PER_SECOND] == [None, "ms", "us", "ns"]
    assert unit_of(1_700_000_000, "ms") == "s"
    assert unit_of(-5, "ms") is None


@pytest.mark.parametrize("value", [True, "1", float("nan"), 1e-4, -1, 1e300, None])
def test_a_duration_is_whole_milliseconds(value: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^gap: expected seconds of at least 0, in whole milliseconds, given "
    ):
        duration_ms("gap", value)


def test_durations_and_times_in_words() -> None:
    assert [duration_ms("gap", value) for value in (0, 0.001, 1.1, 86_400, np.int64(3))] == [
        0,
        1,
        1100,
        86_400_000,
        3000,
    ]
    assert shown_time(1_792_891_800_123) == "2026-10-25T01:30:00.123Z"
    assert shown_time(MAX_TIME - 1) == f"{MAX_TIME - 1} ms"
