"""What a field is, a number, a category, words or a time, and how single values are read as such.

The rules here are those of ``docs/model-updates.md``: a consumer in another language reads the same raw record in the
same way. So they use grammars of their own, where Python's ``float`` and ``fromisoformat`` accept more.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, shortened
from streamiter.values.numbers import Floats, is_number
from streamiter.values.times import read_times

Kind: TypeAlias = str
"""``number``: also of texts that are numbers. ``category``: each different value is a feature. ``words``: each word of
a text, or each text of a list, is a feature. ``last 20``: as ``category``, but of a list only its last 20 texts; the
number may be another one. ``time``: it becomes hour, weekday, month and trend."""

KINDS: Final[tuple[Kind, ...]] = ("number", "category", "words", "last 20", "time")
"""The kinds; another number from 1 to 999 may be in place of 20."""
_LAST: Final = re.compile(r"last ([1-9]\d{0,2})", re.ASCII)

# What a value is, other than a plain number: an array has one of these for each row.
NO_VALUE: Final = 0
"""The row has neither a text nor a time."""
OTHER: Final = 1
"""A text that is none of the following, or a list of texts. Codes from :data:`PADDED` on have a number."""
BLANK: Final = 2
"""A text that means a missing value where texts are read as numbers or times."""
NEAR_NUMBER: Final = 3
"""A number with a unit, or with commas, which may be decimal or between thousands: it is another text."""
PADDED: Final = 4
"""A number that begins with 0, as ids do: it counts as another text while the kind of the field is not decided."""
PLAIN_NUMBER: Final = 5
DATE: Final = 6
"""A time without an hour."""
TIME: Final = 7

HUGE: Final = 1e100
"""Numbers that are larger in size count as missing: their squares are added up, and stay finite."""

BLANKS: Final = frozenset({"", "?", "na", "n/a", "nan", "none", "null", "inf", "-inf"})
"""The texts, in small letters, that are :data:`BLANK`."""

_SPACE: Final = " \t\r\n"
_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_PADDED: Final = re.compile(r"[+-]?0\d", re.ASCII)
# As 1,5 and 1,000 and $3 and 5% and 12.5 km and 60 km/h. Without a space only known units count: 12b may be an id.
_DIGITS: Final = r"[+-]?\d+(?:[.,]\d+)*"
_UNIT: Final = r"\s+[^\W\d_]{1,5}(?:/[^\W\d_]{1,4})?|\s?[%$€£]|\s?°[CF]?|[kcm]m|[km]g|ml|ms|min|[kKMG]B"
_NEAR_NUMBER: Final = re.compile(rf"{_DIGITS},\d+|{_DIGITS}(?:{_UNIT})|[$€£]\s?{_DIGITS}")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?:(:\d\d)([.,]\d{1,9})?)?(Z|[+-](?:[01]\d|2[0-3]):?[0-5]\d)?)?", re.ASCII
)
_WORD: Final = re.compile(r"\w+")
# A text of more different words is a document; only its first words count.
_WORDS_MAX: Final = 200

_EPOCH: Final = datetime(1970, 1, 1)
_MILLISECOND: Final = timedelta(milliseconds=1)
_DAY_MS: Final = 86_400_000
# The offsets of all zones change at multiples of this many milliseconds.
_OFFSET_MS: Final = 900_000
# A larger number is a time in milliseconds: in seconds it would be the year 5138.
_SECONDS_MAX: Final = 100_000_000_000

ReadText = tuple[int, float]
"""What a text is, and its number, or its time in milliseconds; NaN if it is neither."""

OTHER_TEXT: Final[ReadText] = (OTHER, math.nan)


class Readings(NamedTuple):
    """For each row of a field, what its value is, other than a plain number."""

    codes: npt.NDArray[np.uint8]
    """``NO_VALUE``, ``OTHER``, … for each row."""
    values: Floats
    """Numbers of texts; times as milliseconds since 1970 by the clock on the wall; NaN in other rows."""

    def of_rows(self, rows: Any) -> Readings:
        """Return the readings of some rows."""
        return Readings(self.codes[rows], self.values[rows])


def checked_kinds(owner: str, given: Any) -> dict[str, Kind]:
    """Return the kinds of fields. Raises ConfigurationError unless they are a dict of names and kinds."""
    kinds: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else {None: given}
    wrong = {name: kind for name, kind in kinds.items() if not isinstance(name, str) or not is_kind(kind)}
    if wrong:
        raise ConfigurationError(
            f"{owner}(kinds=): expected a dict such as {{'km': 'number'}} with the kinds {', '.join(KINDS)}, given "
            f"{shortened(wrong if isinstance(given, Mapping) else given)}"
        )
    return kinds


def is_kind(kind: object) -> bool:
    """Whether this is the name of a kind."""
    return isinstance(kind, str) and (kind in KINDS or preparation_of(kind) is not None)


def time_zone_of(owner: str, name: str | None) -> tzinfo | None:
    """Return the time zone of a name. Raises ConfigurationError for a name that the IANA does not have."""
    if name is None:
        return None
    import zoneinfo  # Few models need it.

    try:
        return zoneinfo.ZoneInfo(name)
    except Exception:
        raise ConfigurationError(
            f"{owner}(time_zone=): expected the name of a time zone of the IANA, given {shortened(name)}; write "
            'time_zone="Europe/Berlin", or "UTC"'
        ) from None


# ---- texts


def read_text(text: str, zone: tzinfo | None) -> ReadText:
    """Return what a text is, and its number or time.

    >>> read_text("1.5", None), read_text("007", None), read_text("1,5", None)[0] == OTHER
    ((5, 1.5), (4, 7.0), False)
    >>> read_text("1970-01-02", None), read_text("1970-01-01T01:00+01:00", UTC)
    ((6, 86400000.0), (7, 0.0))
    """
    stripped = text.strip(_SPACE)
    if stripped[:1] in "0123456789+-.$€£":  # The empty text is in it, too.
        if _NUMBER.fullmatch(stripped):
            return PADDED if _PADDED.match(stripped) else PLAIN_NUMBER, float(stripped)
        if match := _TIME.fullmatch(stripped):
            return _read_iso(match, zone)
        if _NEAR_NUMBER.fullmatch(stripped):
            return NEAR_NUMBER, math.nan
    return (BLANK, math.nan) if len(stripped) <= 4 and stripped.lower() in BLANKS else OTHER_TEXT


def number_of_text(text: str) -> float | None:
    """Return the number that a text is; None for other texts, and for numbers that count as missing.

    >>> number_of_text("1.5"), number_of_text("1e101"), number_of_text("NA")
    (1.5, None, None)
    """
    stripped = text.strip(_SPACE)
    number = float(stripped) if _NUMBER.fullmatch(stripped) else math.nan
    return number if abs(number) <= HUGE else None


def _read_iso(match: re.Match[str], zone: tzinfo | None) -> ReadText:
    day, minutes, seconds, fraction, offset = match.groups()
    digits = f".{fraction[1:4]:0<3}" if fraction else ""
    try:
        if minutes is None:
            return DATE, _wall_ms(datetime.fromisoformat(day), None)
        at = datetime.fromisoformat(f"{day}T{minutes}{seconds or ':00'}{digits}{offset or ''}")
        return TIME, _wall_ms(at, zone)
    except (ValueError, OverflowError):
        return OTHER_TEXT


def words_of(value: Any) -> Any:
    """Return the different words of a text in small letters, at most 200; None for a missing number; others as given.

    >>> words_of("Heavy rain, heavy WIND"), words_of(["Gift", "card"])
    (['heavy', 'rain', 'wind'], ['Gift', 'card'])
    """
    if isinstance(value, str):
        return list(dict.fromkeys(_WORD.findall(value.lower())))[:_WORDS_MAX]
    return None if _is_missing(value) else value


def category_of(value: Any) -> Any:
    """Return the category of a text, a number or a truth value, as a text; None for a missing number; others as given.

    >>> category_of(7.0), category_of(True), category_of(["a"])
    ('7', '1', ['a'])
    """
    if _is_missing(value):
        return None
    return as_text(value) if isinstance(value, str) or is_number(value) or isinstance(value, np.bool_) else value


def preparation_of(kind: Kind) -> Callable[[Any], Any] | None:
    """Return the function that prepares the values of a kind of texts; None for other kinds.

    >>> preparation_of("last 2")(["i3", "i9", "i4"]), preparation_of("number")
    (['i9', 'i4'], None)
    """
    if (last := _LAST.fullmatch(kind)) is not None:
        count = int(last[1])
        return lambda value: value[-count:] if isinstance(value, list) else category_of(value)
    return _PREPARATIONS.get(kind)


_PREPARATIONS: Final[Mapping[Kind, Callable[[Any], Any]]] = {"category": category_of, "words": words_of}


def _is_missing(value: Any) -> bool:
    # A whole number may be too large for a float, and HUGE is too large for a narrow one.
    number: Any = float(value) if isinstance(value, np.floating) else value
    return value is None or (is_number(value) and not abs(number) <= HUGE)


def as_text(value: Any) -> str | None:
    """Return the text that is hashed for a value, None for a missing value. Equal values have the same text.

    NULs at the end of a text are removed: columns of numpy cannot hold them, and dicts must give the same features.
    """
    if isinstance(value, str):
        return value.rstrip("\0")
    if isinstance(value, (int, np.integer, np.bool_)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if math.isnan(number):
            return None
        return str(int(number)) if number.is_integer() else repr(number)
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape").rstrip("\0")
    raise TypeError


# ---- times


def is_time(value: object) -> bool:
    """Whether the value is a date or time of Python, numpy or pandas."""
    return isinstance(value, (date, np.datetime64))


def is_no_time(value: object) -> bool:
    """Whether the value is NaT, the missing time of numpy or pandas."""
    return is_time(value) and value != value


def read_moment(value: Any, zone: tzinfo | None) -> ReadText:
    """Return what a date or time is, and its milliseconds; ``NO_VALUE`` for NaT.

    >>> read_moment(datetime(1970, 1, 1, 1), None), read_moment(date(1970, 1, 2), None)
    ((7, 3600000.0), (6, 86400000.0))
    """
    if isinstance(value, np.datetime64):
        readings = read_datetimes(np.array([value]), zone)
        return int(readings.codes[0]), float(readings.values[0])
    if not isinstance(value, datetime):
        return DATE, float((value - _EPOCH.date()).days * _DAY_MS)
    if value != value:  # NaT of pandas is a datetime.
        return NO_VALUE, math.nan
    return TIME, _wall_ms(value, zone)


def read_datetimes(times: npt.NDArray[Any], zone: tzinfo | None) -> Readings:
    """Return the readings of an array of ``datetime64``, which is in UTC; those of whole days are dates."""
    is_day = np.datetime_data(times.dtype)[0] in ("Y", "M", "W", "D")
    unit = times.astype("M8[D]") if is_day else times
    found, failures = read_times(unit)
    ms = found.astype(np.float64)
    ms[list(failures)] = np.nan
    codes = np.where(np.isnan(ms), NO_VALUE, DATE if is_day else TIME).astype(np.uint8)
    return Readings(codes, ms if is_day or zone is None else _in_zone(ms, zone))


def time_of_number(number: float, zone: tzinfo | None) -> float:
    """Return the milliseconds of a number of seconds or milliseconds since 1970 UTC; NaN for a missing number.

    >>> time_of_number(1.5, None), time_of_number(1_700_000_000_000, None) == time_of_number(1_700_000_000, None)
    (1500.0, True)
    """
    return float(times_of_numbers(np.array([number], dtype=np.float64), zone)[0])


def times_of_numbers(numbers: Floats, zone: tzinfo | None) -> Floats:
    """Return :func:`time_of_number` for each number."""
    ms = np.floor(np.where(np.abs(numbers) > _SECONDS_MAX, numbers, numbers * 1000.0))
    ms[~((ms >= _EARLIEST_MS) & (ms < _LATEST_MS))] = np.nan
    return ms if zone is None else _in_zone(ms, zone)


def times_of_values(
    readings: Readings | None, numbers: Floats | None, is_there: npt.NDArray[np.bool_], zone: tzinfo | None
) -> Floats:
    """Return milliseconds for these values, which are times, or numbers of seconds or milliseconds; else NaN."""
    ms = np.full(len(is_there), np.nan)
    if numbers is not None:
        ms = times_of_numbers(np.where(is_there, numbers, np.nan), zone)
    if readings is not None:
        of_texts = np.where(readings.codes >= DATE, readings.values, times_of_numbers(readings.values, zone))
        ms = np.where(readings.codes >= PADDED, of_texts, ms)
    return np.where(is_there, ms, np.nan)


# The years 1 to 9999, as in texts.
_EARLIEST_MS: Final = -62_135_596_800_000.0
_LATEST_MS: Final = 253_402_300_800_000.0


def _wall_ms(at: datetime, zone: tzinfo | None) -> float:
    """Return the time that a clock on the wall shows: in the zone, or where there is none in the time's own zone."""
    if zone is not None and at.utcoffset() is not None:
        at = at.astimezone(zone)
    return float((at.replace(tzinfo=None) - _EPOCH) // _MILLISECOND)


def _in_zone(ms: Floats, zone: tzinfo) -> Floats:
    """Return the time on the wall in the zone for each time in UTC."""
    periods, place = np.unique(ms // _OFFSET_MS, return_inverse=True)
    offsets = np.full(len(periods), np.nan)
    for at, period in enumerate(periods.tolist()):
        with contextlib.suppress(OverflowError, ValueError):  # NaN, or hours before the year 1 or behind 9999.
            moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=period * _OFFSET_MS)
            offsets[at] = (moment.astimezone(zone).utcoffset() or timedelta()) / _MILLISECOND
    wall: Floats = ms + offsets[place]
    return wall


PARTS: Final[Mapping[str, range]] = MappingProxyType({"hour": range(24), "weekday": range(1, 8), "month": range(1, 13)})
"""The parts of a time that are categories, and their values. Weekdays are 1 (Monday) to 7."""

TREND: Final = "trend"
"""The part of a time that is a number: the days since 1970."""


def part_of(field: str, part: str) -> str:
    """Return the name of a part of a time.

    >>> part_of("at", "hour")
    'at[hour]'
    """
    return f"{field}[{part}]"


def parts_of_times(ms: Floats) -> tuple[dict[str, npt.NDArray[np.intp]], Floats]:
    """Return the numbers of :data:`PARTS` for each time, and the trend. NaN must not be among the times.

    >>> parts_of_times(np.array([1_700_000_000_000.0]))
    ({'hour': array([22]), 'weekday': array([2]), 'month': array([11])}, array([19675.92592593]))
    """
    days = np.floor(ms / _DAY_MS)
    hour = (ms - days * _DAY_MS) // 3_600_000
    month = days.astype(np.int64).astype("M8[D]").astype("M8[M]").astype(np.int64) % 12 + 1
    # 1970-01-01 was a Thursday.
    numbers = {"hour": hour, "weekday": (days + 3) % 7 + 1, "month": month}
    return {part: number.astype(np.intp) for part, number in numbers.items()}, ms / _DAY_MS


def parts_of_time(field: str, code: int, ms: float) -> dict[str, Any]:
    """Return the fields that one time becomes; a date has no hour.

    >>> parts_of_time("at", DATE, 0.0)
    {'at[weekday]': '4', 'at[month]': '1', 'at[trend]': 0.0}
    """
    parts, trend = parts_of_times(np.array([ms]))
    fields: dict[str, Any] = {
        part_of(field, part): str(int(number[0])) for part, number in parts.items() if part != "hour" or code == TIME
    }
    return fields | {part_of(field, TREND): float(trend[0])}


def are_texts(value: object) -> bool:
    """Whether the value is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def prepared_value(field: str, kind: Kind, value: Any, zone: tzinfo | None, *, in_texts: bool) -> dict[str, Any] | None:
    """Return the fields that the value of a field becomes: numbers, texts, lists of texts, None where it is missing.

    ``in_texts`` tells whether the model knows texts of this field. None: the value does not fit the field.

    >>> prepared_value("note", "words", "Gift card", None, in_texts=True)
    {'note': ['gift', 'card']}
    >>> prepared_value("km", "number", "7.5", None, in_texts=False)
    {'km': 7.5}
    """
    if _is_missing(value):
        return {field: None}
    if (prepare := preparation_of(kind)) is not None:
        found = prepare(value)
        return {field: found} if found is None or isinstance(found, str) or are_texts(found) else None
    if isinstance(value, str):
        code, number = read_text(value, zone)
    elif is_time(value):
        code, number = read_moment(value, zone)
    elif is_number(value) or isinstance(value, np.bool_):
        code, number = PLAIN_NUMBER, float(value)
    else:
        code, number = (OTHER if value else NO_VALUE), math.nan
        if not are_texts(value):
            return None
    can_be_number = code == PLAIN_NUMBER or (code == PADDED and not in_texts)
    if can_be_number and kind == "number":
        return {field: number}
    if kind == "time" and (code >= DATE or (can_be_number and not in_texts)):
        ms = number if code >= DATE else time_of_number(number, zone)
        return {field: None} if math.isnan(ms) else parts_of_time(field, DATE if code == DATE else TIME, ms)
    if in_texts and isinstance(value, (str, list)):
        return {field: value}
    if code in (NO_VALUE, BLANK):
        return {field: [] if isinstance(value, list) else None}
    return None


NO_KINDS: Final[Mapping[str, Kind]] = MappingProxyType({})
