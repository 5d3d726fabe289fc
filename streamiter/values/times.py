"""Event time: timestamps and watermarks as whole milliseconds since 1970-01-01 UTC, and how values are read as such.

A timestamp is an int64 between −2⁶² and 2⁶². A watermark w says that no record with a timestamp below w is expected;
``MAX_TIME`` says that none is expected at all, and ``MIN_TIME`` that nothing is known.

>>> read_times([1.5, "2026", None], "s")[0].tolist(), sorted(read_times([1.5, "2026", None], "s")[1])
([1500, 0, 0], [1, 2])
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, shortened

Times = npt.NDArray[np.int64]
"""Timestamps of a batch in milliseconds, one for each record."""

TimeUnit = Literal["s", "ms", "us", "ns", "iso"]
"""How a number is read (seconds to nanoseconds), or that a text is a date and time of ISO 8601."""

MAX_TIME: Final = 2**63 - 1
"""The watermark behind the last record."""

MIN_TIME: Final = -(2**63)
"""The watermark before the first one. In an array of timestamps: the record has none."""

TIME_LIMIT: Final = 2**62
"""A timestamp is greater than −TIME_LIMIT and less than TIME_LIMIT, so that a duration may be added to it."""


def before_end(watermark: int) -> int:
    """Return a watermark; none in place of the last one, so that event time continues from the greatest timestamps."""
    return MIN_TIME if watermark == MAX_TIME else watermark


# For each unit of numbers: milliseconds as a fraction.
_NUMBERS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 10**6)}
)
UNIT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
)
"""The units of numbers in words."""

_DATETIME64: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        **{"D": (86_400_000, 1), "h": (3_600_000, 1), "m": (60_000, 1)},
        **_NUMBERS,
        **{"ps": (1, 10**9), "fs": (1, 10**12), "as": (1, 10**15)},
    }
)

Given = TypeVar("Given")

Seconds = float | timedelta
"""An option in seconds, which may also be given as a duration."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class NoTimestamp(ValueError):
    """A value that is no timestamp: its record is refused. The message is the reason."""


def in_seconds(given: Given | timedelta) -> Given | float:
    """Return an option in seconds as a number, without a check; any other value as it is.

    >>> in_seconds(timedelta(minutes=2)), in_seconds(120)
    (120.0, 120)
    """
    return given.total_seconds() if isinstance(given, timedelta) else given


def duration_ms(option: str, seconds: object, least: float = 0.0) -> int:
    """Return seconds of an option, or its duration, as whole milliseconds. Raises ConfigurationError for anything else.

    >>> duration_ms("tumbling(size)", 1.5), duration_ms("offset", timedelta(seconds=-2), least=-10)
    (1500, -2000)
    """
    seconds = in_seconds(seconds)
    if not isinstance(seconds, bool) and isinstance(seconds, (int, float, np.integer, np.floating)):
        number = float(seconds)
        if math.isfinite(number) and least <= number < TIME_LIMIT / 1000:
            milliseconds = round(number * 1000)
            if abs(number * 1000 - milliseconds) < 1e-6 * max(1.0, abs(number)) and (milliseconds or not number):
                return milliseconds
    bound = "" if least < -1e9 else f" of at least {least:g}"
    raise ConfigurationError(
        f"{option}: expected seconds{bound}, in whole milliseconds, given {seconds!r}; write 0.001 for a millisecond, "
        "or timedelta(minutes=5)"
    )


def shown_time(time: int) -> str:
    """Return a time for people, in UTC.

    >>> shown_time(1_000), shown_time(MAX_TIME), shown_time(MIN_TIME)
    ('1970-01-01T00:00:01.000Z', 'the end of time', 'before all times')
    """
    if time == MAX_TIME:
        return "the end of time"
    if time == MIN_TIME:
        return "before all times"
    try:
        return (_EPOCH + time * _MILLISECOND).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{time} ms"


# -- reading -----------------------------------------------------------------------------------------------


def read_times(
    values: Sequence[Any] | npt.NDArray[Any], unit: TimeUnit | None = None, time_zone: tzinfo | None = None
) -> tuple[Times, dict[int, str]]:
    """Return the timestamps of values, and by index the reason for each value that has none (its timestamp is 0).

    ``unit`` is that of ints (floats are always seconds), or ``"iso"`` for texts. ``time_zone`` is that of datetimes and
    texts without one. Fractions of a millisecond are dropped downwards. Raises ConfigurationError for values that need
    another ``unit`` or ``time_zone``.

    >>> read_times(np.array(["1969-12-31T23:59:59.9999"], "M8[us]"))
    (array([-1]), {})
    """
    times, is_known = _read_all(values, unit, time_zone)
    failures: dict[int, str] = {}
    for index in np.flatnonzero(~is_known).tolist():
        try:
            times[index] = read_time(values[index], unit, time_zone)
        except NoTimestamp as reason:
            failures[index] = str(reason)
    return times, failures


def read_time(value: Any, unit: TimeUnit | None = None, time_zone: tzinfo | None = None) -> int:
    """Return the timestamp of one value, as :func:`read_times` does. Raises NoTimestamp with the reason."""
    if isinstance(value, np.datetime64):
        _check_datetime64(unit, time_zone)
        return _checked(_exact_datetime64(value), value)
    if isinstance(value, (np.floating, np.integer, np.str_)):
        value = float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, datetime):
        return _checked(_instant(value, time_zone), value)
    if isinstance(value, str):
        if unit != "iso":
            raise NoTimestamp(
                f'expected a time, given the text {shortened(value)}; a text needs unit="iso", and time_zone="UTC" or '
                "another one if it names none"
            )
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError:
            raise NoTimestamp(
                f"expected a date and time of ISO 8601, such as 2026-03-01T10:40Z, given {shortened(value)}"
            ) from None
        return _checked(_instant(parsed, time_zone), value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NoTimestamp(f"expected a time, given {value!r}")
        if unit != "s":
            raise NoTimestamp(f'expected a time, given the float {value!r}; a float is in seconds and needs unit="s"')
        from fractions import Fraction  # It takes some milliseconds to import, and few values need it.

        return _checked(round(Fraction(value) * 10**6) // 1000, value)
    if isinstance(value, int) and not isinstance(value, bool):
        if unit is None:
            raise ConfigurationError(
                f'event_time: expected unit= for whole numbers, given {value!r} without; write unit="s", "ms", "us" '
                'or "ns"'
            )
        if unit == "iso":
            raise NoTimestamp(f'expected a text, because of unit="iso", given {value!r}')
        numerator, denominator = _NUMBERS[unit]
        return _checked(value * numerator // denominator, value)
    raise NoTimestamp(f"expected a time, given {shortened(value)} ({type(value).__name__})")


def unit_of(value: float, unit: str) -> str | None:
    """Return the unit in which a number is a time of the years 2000 to 2099, if it is none in ``unit``; otherwise None.

    >>> unit_of(1_700_000_000_000, "s"), unit_of(1_700_000_000, "s"), unit_of(5, "s")
    ('ms', None, None)
    """

    def is_usual(candidate: str) -> bool:
        numerator, denominator = _NUMBERS[candidate]
        return _YEAR_2000 <= value * numerator / denominator < _YEAR_2100

    return None if is_usual(unit) else next((other for other in _NUMBERS if is_usual(other)), None)


_YEAR_2000: Final = 946_684_800_000
_YEAR_2100: Final = 4_102_444_800_000


def _checked(time: int, value: object) -> int:
    if not -TIME_LIMIT < time < TIME_LIMIT:
        raise NoTimestamp(f"expected a time within 146 million years of 1970, given {shortened(value)}")
    return time


def _instant(moment: datetime, time_zone: tzinfo | None) -> int:
    if moment != moment:  # NaT of pandas is a datetime
        raise NoTimestamp("expected a time, given NaT")
    if moment.utcoffset() is None:
        if time_zone is None:
            raise ConfigurationError(
                f"event_time: expected dates with a time zone, given {shortened(str(moment))} without; write "
                'time_zone="Europe/Berlin", or "UTC"'
            )
        moment = moment.replace(tzinfo=time_zone)
    return (moment - _EPOCH) // _MILLISECOND


def _check_datetime64(unit: TimeUnit | None, time_zone: tzinfo | None) -> None:
    if unit is not None or time_zone is not None:
        option = "unit=" if unit is not None else "time_zone="
        raise ConfigurationError(
            f"event_time: expected no {option} for values of datetime64, which have a unit and are in UTC, given both; "
            f"leave {option} out"
        )


def _exact_datetime64(value: np.datetime64) -> int:
    name, count = np.datetime_data(value.dtype)
    if np.isnat(value) or name == "generic":
        raise NoTimestamp("expected a time, given NaT")
    if name in ("Y", "M", "W"):
        value, name, count = value.astype("M8[D]"), "D", 1
    numerator, denominator = _DATETIME64[name]
    return int(value.astype(np.int64)) * count * numerator // denominator


def _read_all(
    values: Sequence[Any] | npt.NDArray[Any], unit: TimeUnit | None, time_zone: tzinfo | None
) -> tuple[Times, npt.NDArray[np.bool_]]:
    """Return the timestamps of values that numpy reads at once, and for which values it does."""
    if not isinstance(values, np.ndarray):
        kinds = set(map(type, values))
        if kinds == {float} or kinds == {int}:
            with contextlib.suppress(OverflowError):
                values = np.array(values, np.float64 if kinds == {float} else np.int64)
    if isinstance(values, np.ndarray) and values.ndim == 1:
        if values.dtype.kind == "M":
            _check_datetime64(unit, time_zone)
            name, count = np.datetime_data(values.dtype)
            if name in _DATETIME64:
                numerator, denominator = _DATETIME64[name]
                return _scaled(
                    values.astype(values.dtype.newbyteorder("=")).view(np.int64), count * numerator, denominator
                )
        elif values.dtype.kind in "iu" and unit is not None and unit in _NUMBERS:
            is_small = values <= np.iinfo(np.int64).max
            times, is_known = _scaled(np.where(is_small, values, 0).astype(np.int64), *_NUMBERS[unit])
            return times, is_known & is_small
        elif values.dtype.kind == "f" and values.dtype.itemsize <= 8 and unit == "s":
            return _from_seconds(values.astype(np.float64))
    return np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)


def _scaled(ticks: Times, numerator: int, denominator: int) -> tuple[Times, npt.NDArray[np.bool_]]:
    limit = min(TIME_LIMIT * denominator, MAX_TIME) // numerator
    is_known = (ticks > -limit) & (ticks < limit)
    times: Times = np.where(is_known, ticks, 0) * numerator // denominator
    return times, is_known


# Within this distance of the middle between two microseconds, exact arithmetic decides.
_MIDDLE: Final = 1e-6


def _from_seconds(seconds: npt.NDArray[np.float64]) -> tuple[Times, npt.NDArray[np.bool_]]:
    # Apart from the whole seconds, a fraction in microseconds is exact but for the last bits.
    is_known = np.abs(seconds) < TIME_LIMIT / 1000 - 1
    whole = np.floor(np.where(is_known, seconds, 0.0))
    microseconds = (np.where(is_known, seconds, 0.0) - whole) * 1e6
    is_known &= np.abs(microseconds - np.floor(microseconds) - 0.5) > _MIDDLE
    times: Times = whole.astype(np.int64) * 1000 + np.rint(microseconds).astype(np.int64) // 1000
    return times, is_known
