"""Values are read as timestamps: exactly, downwards, and each bad value by itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from random import Random
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from support.examples import random_examples

from streamiter.errors import ConfigurationError
from streamiter.values.times import MAX_TIME, TIME_LIMIT, duration_ms, read_times, shown_time, unit_of

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
