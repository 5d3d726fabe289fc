"""The kinds of windows as users make them, and the days, weeks and months of time zones, however clocks change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from random import Random
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from support.examples import random_examples

from streamiter import calendar, hopping, session, sliding, tumbling
from streamiter.errors import ConfigurationError
from streamiter.operators.timed.kinds import Calendar, CalendarUnit, Hopping, Session, Sliding

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
