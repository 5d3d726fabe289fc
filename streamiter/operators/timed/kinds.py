"""The kinds of windows: which intervals of time a record belongs to.

Times are milliseconds since 1970 UTC, and intervals are half-open. Users make kinds with the functions of this module,
which take seconds: :func:`tumbling`, :func:`hopping`, :func:`calendar`, :func:`sliding` and :func:`session`.

>>> hopping(10, 5).windows_of(12_000)
[(5000, 15000), (10000, 20000)]
>>> tumbling(10, offset_s=3).windows_of(2_000)
[(-7000, 3000)]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.operators.definitions import Definition
from streamiter.values.numbers import one_of
from streamiter.values.times import Seconds, Times, duration_ms

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

Interval = tuple[int, int]
"""The first millisecond of a window, and the first one after it."""


class AlignedWindow(Protocol):
    """A kind whose windows depend only on the time of a record, not on other records."""

    def windows_of(self, time: int) -> list[Interval]:
        """Return the windows that contain a time, in order."""


@dataclass(frozen=True, slots=True)
class Hopping:
    """Windows of one length that begin every ``step_ms``; tumbling if the step is the length."""

    size_ms: int
    step_ms: int
    offset_ms: int = 0

    def definition(self) -> Definition:
        offset = {"offset_ms": self.offset_ms % self.step_ms}  # An offset of a step more gives the same windows.
        if self.size_ms == self.step_ms:
            return {"windows": "tumbling", "size_ms": self.size_ms, **offset}
        return {"windows": "hopping", "size_ms": self.size_ms, "step_ms": self.step_ms, **offset}

    def windows_of(self, time: int) -> list[Interval]:
        since_offset = time - self.offset_ms
        last = since_offset // self.step_ms
        first = (since_offset - self.size_ms) // self.step_ms + 1
        starts = range(first * self.step_ms + self.offset_ms, last * self.step_ms + self.offset_ms + 1, self.step_ms)
        return [(start, start + self.size_ms) for start in starts]

    def windows_of_each(self, times: Times) -> tuple[npt.NDArray[np.intp], Times]:
        """Return for each pair of a record and a window of it the index of the record and the start of the window.

        The indices ascend.
        """
        last = (times - self.offset_ms) // self.step_ms
        most = -(-self.size_ms // self.step_ms)
        if most == 1 and self.size_ms == self.step_ms:
            return np.arange(len(times)), last * self.step_ms + self.offset_ms
        starts = (last[:, None] - np.arange(most - 1, -1, -1)) * self.step_ms + self.offset_ms
        indices, columns = np.nonzero(starts > (times - self.size_ms)[:, None])
        return indices, starts[indices, columns]


CalendarUnit = Literal["day", "week", "month"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
# The rules of time zones shift clocks by a day at most, where a country moves to the other side of the date line.
_LONGEST_GAP_MS: Final = 26 * 3_600_000


@dataclass(frozen=True, slots=True)
class Calendar:
    """Days, weeks or months of a time zone: from the first instant of a local date to the first instant of another.

    >>> march = calendar("month", "Europe/Berlin").windows_of(1_774_735_200_000)
    >>> [(end - start) / 3_600_000 for start, end in march]
    [743.0]
    """

    unit: CalendarUnit
    zone: ZoneInfo
    _latest: list[Interval] = field(default_factory=list, compare=False, repr=False)
    """The window that was returned last, since most records are in the same window as the record before."""

    def definition(self) -> Definition:
        return {"windows": "calendar", "unit": self.unit, "time_zone": self.zone.key}

    def windows_of(self, time: int) -> list[Interval]:
        # A copy: a subtask in another thread may replace the window meanwhile.
        latest = list(self._latest)
        if latest and latest[0][0] <= time < latest[0][1]:
            return latest
        try:
            latest = [self._window_of(time)]
        except OverflowError:
            raise ValueError(f"calendar window: expected a time in the years 2 to 9998, given {time} ms") from None
        self._latest[:] = latest
        return latest

    def _window_of(self, time: int) -> Interval:
        first = self._first_date(self._local_date(time))
        following = self._following(first)
        # Where clocks are set back across midnight, a date is interrupted by the date before it.
        while self._first_instant(following) <= time:
            first, following = following, self._following(following)
        return self._first_instant(first), self._first_instant(following)

    def _first_date(self, day: date) -> date:
        if self.unit == "month":
            return day.replace(day=1)
        return day - timedelta(days=day.weekday()) if self.unit == "week" else day

    def _following(self, first: date) -> date:
        if self.unit == "month":
            return (first + timedelta(days=31)).replace(day=1)
        return first + timedelta(days=7 if self.unit == "week" else 1)

    def _local_date(self, time: int) -> date:
        return (_EPOCH + timedelta(milliseconds=time)).astimezone(self.zone).date()

    def _first_instant(self, day: date) -> int:
        """Return the first instant of a local date, which is not midnight where clocks are set forward at midnight."""
        midnight = datetime(day.year, day.month, day.day, tzinfo=self.zone)
        instant = (midnight.astimezone(UTC) - _EPOCH) // _MS
        if self._local_date(instant - 1) < day:
            return instant
        before = instant - _LONGEST_GAP_MS
        while instant - before > 1:
            middle = (before + instant) // 2
            before, instant = (middle, instant) if self._local_date(middle) < day else (before, middle)
        return instant


@dataclass(frozen=True, slots=True)
class Sliding:
    """For each timestamp t of a key the window of that length whose last millisecond is t."""

    size_ms: int

    def definition(self) -> Definition:
        return {"windows": "sliding", "size_ms": self.size_ms}


@dataclass(frozen=True, slots=True)
class Session:
    """Records of a key that follow each other in less than the gap, and a gap behind the last of them."""

    gap_ms: int

    def definition(self) -> Definition:
        return {"windows": "session", "gap_ms": self.gap_ms}


_LEAST_S: Final = 0.001
_LONGEST_S: Final = 1e12
"""An offset of either sign may be this long: 30,000 years."""

WindowKind = Hopping | Calendar | Sliding | Session
"""What the functions of this module return."""


def tumbling(size_s: Seconds, offset_s: Seconds = 0.0) -> Hopping:
    """Windows of ``size_s`` seconds, one behind the other; each record is in one window.

    A window begins at a multiple of ``size_s`` after 1970-01-01 UTC plus ``offset_s``.

    >>> tumbling(60).windows_of(90_000)
    [(60000, 120000)]
    """
    size = duration_ms("tumbling(size_s)", size_s, _LEAST_S)
    return Hopping(size, size, _offset_ms("tumbling(offset_s)", offset_s))


def hopping(size_s: Seconds, step_s: Seconds, offset_s: Seconds = 0.0) -> Hopping:
    """Windows of ``size_s`` seconds that begin every ``step_s`` seconds; a record is in each window that holds it.

    If the step is longer than the size, records between two windows belong to no window.

    >>> hopping(60, 30).windows_of(70_000)
    [(30000, 90000), (60000, 120000)]
    """
    size, step = duration_ms("hopping(size_s)", size_s, _LEAST_S), duration_ms("hopping(step_s)", step_s, _LEAST_S)
    return Hopping(size, step, _offset_ms("hopping(offset_s)", offset_s))


def calendar(unit: CalendarUnit, time_zone: str) -> Calendar:
    """Days, weeks (from Monday) or months of a time zone, such as ``"Europe/Berlin"``.

    A day has 23 or 25 hours where clocks are set forward or back.

    >>> calendar("day", "UTC").windows_of(86_400_001)
    [(86400000, 172800000)]
    """
    one_of("calendar(unit)", unit, "day", "week", "month")
    from zoneinfo import ZoneInfo  # Few flows need it.

    try:
        zone = ZoneInfo(time_zone)
    except Exception as error:  # The errors of a wrong name are of many types: of keys, of values, of files.
        raise ConfigurationError(
            f"calendar(time_zone): expected the name of a time zone such as 'Europe/Berlin', given {time_zone!r}; "
            "on a machine without time zones install tzdata"
        ) from error
    return Calendar(unit, zone)


def sliding(size_s: Seconds) -> Sliding:
    """For each timestamp of a key, the ``size_s`` seconds that end with it: its result is a running aggregate.

    >>> sliding(3600)
    Sliding(size_ms=3600000)
    """
    return Sliding(duration_ms("sliding(size_s)", size_s, _LEAST_S))


def session(gap_s: Seconds) -> Session:
    """Records of a key that are less than ``gap_s`` seconds apart are in one window, which ends a gap after the last.

    Records exactly a gap apart are in two windows.

    >>> session(30 * 60)
    Session(gap_ms=1800000)
    """
    return Session(duration_ms("session(gap_s)", gap_s, _LEAST_S))


def _offset_ms(option: str, offset_s: Seconds) -> int:
    """Return an offset of either sign in milliseconds."""
    return duration_ms(option, offset_s, -_LONGEST_S)
