"""What the values of fields were, in bounded memory: profiles of rows, and the comparison of two of them.

A profile does not depend on the order of its rows, or on how they were cut.

>>> from streamiter.values.named_rows import FieldReader
>>> reader, before = FieldReader(bits=18), FieldProfiles()
>>> before.add(reader.rows([{"km": n % 50, "sky": "sun" if n % 3 else "rain"} for n in range(3_000)]))
>>> now = FieldProfiles(before)
>>> now.add(reader.rows([{"km": n % 50, "sky": "sun" if n % 3 else "snow"} for n in range(3_000)]))
>>> [(each["field"], each["shifted"]) for each in compared(before, now)]
[('km', []), ('sky', ['new values', 'psi'])]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple, Self, TypedDict

import numpy as np
import numpy.typing as npt

from streamiter.values.field_kinds import HUGE
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.numbers import Array, Floats, Indices

_Codes = npt.NDArray[np.uint64]

PROFILED_FIELDS_MAX: Final = 256
"""At most this many fields are profiled; a record of a stranger may have any number of names."""
GROUPS_MAX: Final = 512
"""At most this many groups of values of a field are counted."""
# A text is known by 16 bits of its hash. Of texts that are new, this hides as large a share as known ones fill: 1.5 %
# for a thousand of them.
_KNOWN_TEXTS: Final = 1 << 16
# Rows wait until there are as many, since numpy's calls cost as much as some hundred values.
_WAITING_ROWS: Final = 4_096
_SIGN: Final = np.uint64(1 << 63)
_NOTHING: Final[_Codes] = np.zeros(0, np.uint64)
_NO_COUNTS: Final[Indices] = np.zeros(0, np.intp)
# The codes of -HUGE and HUGE, and of all hashes but ABSENT.
_NUMBERS_THERE: Final = (~np.float64(HUGE).view(np.uint64) & ~_SIGN, np.float64(HUGE).view(np.uint64) | _SIGN)
_TEXTS_THERE: Final = (np.uint64(0), ~_SIGN)


def codes_of_numbers(numbers: Floats) -> _Codes:
    """Return whole numbers in the same order; -0.0 is 0.0, and NaN is below or above all others.

    >>> codes = codes_of_numbers(np.array([-2.5, -1.0, 0.0, 1e-300, 7.0]))
    >>> bool((codes[1:] > codes[:-1]).all())
    True
    """
    numbers = numbers + 0.0
    # All bits of a negative number are turned, and the sign of others.
    codes = (numbers.view(np.int64) >> np.int64(63)).view(np.uint64)
    codes |= _SIGN
    codes ^= numbers.view(np.uint64)
    return codes


def _ordered(codes: _Codes, lowest: np.uint64, highest: np.uint64) -> _Codes:
    """Return the codes in order, without missing values: sorting leaves these at the ends."""
    codes = np.sort(codes)
    return codes[np.searchsorted(codes, lowest) : np.searchsorted(codes, highest, "right")]


def _runs(codes: _Codes) -> tuple[_Codes, Indices]:
    """Return the different codes, and how often each occurs, of codes in order."""
    ends = np.append(np.flatnonzero(codes[1:] != codes[:-1]), len(codes) - 1) if len(codes) else _NO_COUNTS
    counts = ends + 1
    counts[1:] -= counts[:-1].copy()
    return codes[ends], counts


class GroupCounts:
    """How many values each group has: a group are the codes that are the same without their last ``level`` bits.

    The level is the smallest one with at most :data:`GROUPS_MAX` groups, so it depends on the set of the codes only.

    >>> counts = GroupCounts()
    >>> counts.add(np.array([7, 7, 9], np.uint64))
    >>> counts.level, counts.groups.tolist(), counts.counts.tolist()
    (0, [7, 9], [2, 1])
    """

    def __init__(self, level: int = 0, groups: _Codes = _NOTHING, counts: Indices = _NO_COUNTS) -> None:
        self.level = level
        self.groups = groups
        """The codes without their last bits, in ascending order."""
        self.counts = counts

    def add(self, codes: _Codes) -> None:
        """Count these values, whose codes are in order."""
        self._add(*_runs(codes >> np.uint64(self.level)))

    def merge(self, other: GroupCounts) -> None:
        """Count the values of another object, too."""
        if len(other.groups):
            level = max(self.level, other.level)
            mine, theirs = self.at(level), other.at(level)
            self.level, self.groups, self.counts = level, mine.groups, mine.counts
            self._add(theirs.groups, theirs.counts)

    def _add(self, groups: _Codes, counts: Indices) -> None:
        at = np.searchsorted(self.groups, groups)
        is_known = np.take(self.groups, at, mode="clip") == groups if len(self.groups) else np.zeros(len(at), np.bool_)
        own = self.counts.copy()  # A state may have the array.
        own[at[is_known]] += counts[is_known]
        self.counts = own
        if not is_known.all():
            is_new = ~is_known
            self.groups = np.insert(self.groups, at[is_new], groups[is_new])
            self.counts = np.insert(own, at[is_new], counts[is_new])
        if len(self.groups) > GROUPS_MAX:
            # Two neighbours share a group from the level on at which their first different bit is gone.
            last = np.sort(self.groups[1:] ^ self.groups[:-1])[-GROUPS_MAX]
            wider = self.at(self.level + int(last).bit_length())
            self.level, self.groups, self.counts = wider.level, wider.groups, wider.counts

    def at(self, level: int) -> GroupCounts:
        """Return the counts of the groups of this level, which is not below the own one."""
        if level == self.level or not len(self.groups):
            return GroupCounts(level, self.groups, self.counts)
        groups = self.groups >> np.uint64(level - self.level)
        first = np.flatnonzero(np.diff(groups, prepend=~groups[:1]))
        return GroupCounts(level, groups[first], np.add.reduceat(self.counts, first))

    def state(self) -> list[Any]:
        """Return everything as plain data; the arrays never change."""
        return [self.level, self.groups, self.counts]


@dataclass(slots=True)
class ValueProfile:
    """What the values of one field were; a value that is not there is missing, and so are NaN and huge numbers."""

    numbers: GroupCounts
    texts: GroupCounts
    rows: int = 0
    """The number of rows with a value."""
    known: npt.NDArray[np.uint8] | None = None
    """Of a reference, by 16 bits of the hash of a text: 0, 1, or 2 for more than one; None without texts."""
    new: int = 0
    """The number of texts that the reference did not have."""

    @classmethod
    def empty(cls) -> ValueProfile:
        """Return a profile without values."""
        return cls(GroupCounts(), GroupCounts())

    def add_numbers(self, numbers: Floats) -> None:
        """Count the numbers of rows."""
        codes = _ordered(codes_of_numbers(numbers), *_NUMBERS_THERE)
        self.rows += len(codes)
        self.numbers.add(codes)

    def add_texts(self, hashes: Indices) -> Indices:
        """Count texts; return which different texts there are, by 16 bits, and how often."""
        texts, counts = _runs(_ordered(hashes.view(np.uint64), *_TEXTS_THERE))
        self.texts.merge(GroupCounts(0, texts, counts))
        return np.stack([(texts & np.uint64(_KNOWN_TEXTS - 1)).astype(np.intp), counts])

    def know(self, texts: Indices) -> None:
        """Know these texts, as :meth:`add_texts` returns them."""
        if texts.size:
            tally = np.bincount(texts[0], np.minimum(texts[1], 2), _KNOWN_TEXTS)
            self.known = _with(self.known, np.minimum(tally, 2.0).astype(np.uint8))

    def merge(self, other: ValueProfile) -> None:
        """Count the values of another profile, too; what is known of a reference is not merged."""
        self.numbers.merge(other.numbers)
        self.texts.merge(other.texts)
        self.rows += other.rows

    def state(self) -> dict[str, Any]:
        """Return everything as plain data."""
        known = None
        if self.known is not None:
            known = [np.flatnonzero(self.known == count).astype(np.uint16) for count in (1, 2)]
        groups = {"numbers": self.numbers.state(), "texts": self.texts.state()}
        return {**groups, "rows": self.rows, "new": self.new, "known": known}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> ValueProfile:
        """Return the profile of a :meth:`state`."""
        known = None
        if state["known"] is not None:
            known = np.zeros(_KNOWN_TEXTS, np.uint8)
            for count, places in enumerate(state["known"], 1):
                known[places] = count
        groups = GroupCounts(*state["numbers"]), GroupCounts(*state["texts"])
        return cls(*groups, state["rows"], known, state["new"])


def _with(known: npt.NDArray[np.uint8] | None, others: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return others if known is None else np.minimum(known + others, np.uint8(2))


class FieldProfiles:
    """Profiles of the fields of rows.

    ``reference`` has the profiles to compare with, which say which texts are new. Without one, these are a reference.
    """

    def __init__(self, reference: FieldProfiles | None = None) -> None:
        self.reference = reference
        self._fields: dict[str, ValueProfile] = {}
        self._waiting: list[tuple[NamedRows, Mapping[str, str]]] = []
        self._waiting_rows = 0
        self.rows = 0
        """The number of rows."""
        self._left_out = 0

    @property
    def fields(self) -> dict[str, ValueProfile]:
        """The profiles, by field."""
        self._add_waiting()
        return self._fields

    @property
    def left_out(self) -> int:
        """The number of values of fields without a profile, because there are too many fields."""
        self._add_waiting()
        return self._left_out

    def add(self, rows: NamedRows, parts: Mapping[str, str] | None = None) -> None:
        """Add rows. ``parts`` has the names of parts of times: with the field, or with "" for those that do not count.

        Of a field of times only missing values are counted.
        """
        self._waiting.append((rows, parts or {}))
        self._waiting_rows += len(rows)
        self.rows += len(rows)
        if self._waiting_rows >= _WAITING_ROWS:
            self._add_waiting()

    def _add_waiting(self) -> None:
        waiting, self._waiting, self._waiting_rows = self._waiting, [], 0
        fields = _fields_of(waiting)
        new = {field: values.first_row() for field, values in fields.items() if field not in self._fields}
        # In the order of their rows, which no cut of batches changes.
        known = set(self._fields).union(() if self.reference is None else self.reference.fields)
        for _, _, field in sorted((first, len(field), field) for field, first in new.items() if first is not None):
            if field in known or len(known) < PROFILED_FIELDS_MAX:
                known.add(field)
                self._fields[field] = ValueProfile.empty()
        for field, values in fields.items():
            if (profile := self._fields.get(field)) is None:
                self._left_out += values.count()
                continue
            if values.numbers:
                profile.add_numbers(np.concatenate(values.numbers))
            profile.rows += values.rows
            if values.texts:
                texts = profile.add_texts(np.concatenate(values.texts))
                if self.reference is None:
                    profile.know(texts)
                elif (before := self._before(field)) is not None and before.known is not None:
                    profile.new += int(texts[1][before.known[texts[0]] == 0].sum())

    def _before(self, field: str) -> ValueProfile | None:
        return None if self.reference is None else self.reference.fields.get(field)

    def state(self) -> dict[str, Any]:
        """Return everything but the reference as plain data."""
        fields = {field: profile.state() for field, profile in self.fields.items()}
        return {"rows": self.rows, "left out": self._left_out, "fields": fields}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], reference: FieldProfiles | None = None) -> Self:
        """Return the profiles of a :meth:`state`."""
        profiles = cls(reference)
        profiles.rows, profiles._left_out = state["rows"], state["left out"]
        profiles._fields = {field: ValueProfile.of_state(each) for field, each in state["fields"].items()}
        return profiles


class _Values:
    """The values of one field in some rows."""

    def __init__(self) -> None:
        self.numbers: list[Floats] = []
        self.texts: list[Indices] = []
        self.rows = 0
        """The number of rows with a text or a time."""
        self._columns: list[tuple[int, Array]] = []
        """All columns, with the number of rows before."""

    def add(self, before: int, column: Array, *, is_time: bool, is_first: bool) -> None:
        """Add a column; ``is_first``: each row with a text of the field has its first one in it."""
        self._columns.append((before, column))
        if is_time:
            self.rows += int(_are_there(column).sum())
        elif column.dtype.kind == "f":
            self.numbers.append(column)
        else:
            self.texts.append(column)
            self.rows += int(np.count_nonzero(column != ABSENT)) if is_first else 0

    def first_row(self) -> int | None:
        """Return the first row with a value, if there is one."""
        found = [(before, _are_there(column)) for before, column in self._columns]
        return min((before + int(there.argmax()) for before, there in found if there.any()), default=None)

    def count(self) -> int:
        """Return the number of values."""
        return sum(int(_are_there(column).sum()) for _, column in self._columns)


def _are_there(column: Array) -> npt.NDArray[np.bool_]:
    there: npt.NDArray[np.bool_] = ~is_missing(column) if column.dtype.kind == "f" else column != ABSENT
    return there


def _fields_of(waiting: Iterable[tuple[NamedRows, Mapping[str, str]]]) -> dict[str, _Values]:
    fields: dict[str, _Values] = {}
    before = 0
    # Small batches of the same fields are put together first.
    for (of_numbers, of_texts, parts), group in groupby(
        waiting, lambda one: (one[0].fields, one[0].text_fields, one[1])
    ):
        pieces = [rows for rows, _ in group]
        numbers = np.concatenate([rows.numbers for rows in pieces]).T
        texts = np.concatenate([rows.places[:, : len(of_texts)] for rows in pieces]).T
        for place, (name, column) in enumerate(
            [*zip(of_numbers, numbers, strict=True), *zip(of_texts, texts, strict=True)]
        ):
            if field := parts.get(name, name):
                # Of a field with several columns of texts, each row has its first text in the first one.
                is_first = place >= len(of_numbers) and of_texts.index(name) == place - len(of_numbers)
                fields.setdefault(field, _Values()).add(before, column, is_time=field != name, is_first=is_first)
        before += numbers.shape[1]
    return fields


# ---- the comparison

Reason = Literal["missing", "new values", "psi", "ks"]


@dataclass(frozen=True)
class ShiftLimits:
    """From which difference on a field has shifted, if it is no chance.

    ``psi``: .25 is the usual limit of a large shift, and .1 that of a small one. A normal distribution that moves by
    half a standard deviation has .25, and a KS of .2, so this is the limit of ``ks``. ``missing`` is a difference of
    shares, and ``new_values`` a share of the values.
    """

    psi: float = 0.25
    ks: float = 0.2
    missing: float = 0.05
    new_values: float = 0.01


class ComparedField(TypedDict):
    """A field in a window, compared with the reference. None: there is nothing to compare."""

    field: str
    missing: float
    """The share of the rows without a value."""
    missing_before: float
    """The same in the reference."""
    new_values: float | None
    """The share of the texts that the reference does not have."""
    psi: float | None
    """The population stability index, on at most 16 groups of values."""
    psi_limit: float | None
    """The index above which the field has shifted: the limit of the settings, or of chance if that is larger."""
    ks: float | None
    """The largest difference of the two distribution functions of the numbers, at the borders of groups."""
    ks_at_most: float | None
    """What the difference may be inside of groups."""
    shifted: list[Reason]
    """The measures that are above their limits; empty for a field that has not shifted."""


# Unchanged independent rows have an alarm in one of a thousand windows, with all fields together.
_FALSE_ALARMS: Final = 0.001
_MEASURES: Final = 4
_GROUPS_OF_PSI: Final = 16
# With fewer expected values in a group, PSI is not distributed as the test assumes.
_VALUES_IN_A_GROUP: Final = 20
# Fewer say nothing of a distribution.
_VALUES_MIN: Final = 20


def compared(
    reference: FieldProfiles, current: FieldProfiles, limits: ShiftLimits | None = None
) -> list[ComparedField]:
    """Return the fields of a window compared with its reference."""
    fields = dict.fromkeys([*reference.fields, *current.fields])
    if not reference.rows or not current.rows:
        return []
    chance = _FALSE_ALARMS / (_MEASURES * max(1, len(fields)))
    test = _Test(limits or ShiftLimits(), chance, NormalDist().inv_cdf(1.0 - chance))
    nothing = ValueProfile.empty()
    return [
        test.of(field, reference.fields.get(field, nothing), current.fields.get(field, nothing), reference, current)
        for field in fields
    ]


class _Test(NamedTuple):
    """Decides which fields have shifted, with this chance of a false alarm for each measure."""

    limits: ShiftLimits
    chance: float
    deviations: float
    """How many standard deviations a normal variable exceeds with this chance."""

    def of(
        self, field: str, before: ValueProfile, now: ValueProfile, reference: FieldProfiles, current: FieldProfiles
    ) -> ComparedField:
        shifted: list[Reason] = []
        missing, missing_before = 1.0 - now.rows / current.rows, 1.0 - before.rows / reference.rows
        is_large = abs(missing - missing_before) > self.limits.missing
        if is_large and self._differ(now.rows, current.rows, before.rows, reference.rows):
            shifted.append("missing")
        new_values = self._new_values(before, now, shifted)
        numbers, texts = _aligned(before.numbers, now.numbers), _aligned(before.texts, now.texts)
        psi = self._psi(np.hstack([numbers, texts]), shifted)
        ks = self._ks(numbers, shifted, is_exact=not max(before.numbers.level, now.numbers.level))
        return {
            "field": field,
            "missing": missing,
            "missing_before": missing_before,
            "new_values": new_values,
            "psi": psi and psi[0],
            "psi_limit": psi and psi[1],
            "ks": ks and ks[0],
            "ks_at_most": ks and ks[1],
            "shifted": shifted,
        }

    def _new_values(self, before: ValueProfile, now: ValueProfile, shifted: list[Reason]) -> float | None:
        count, count_before = int(now.texts.counts.sum()), int(before.texts.counts.sum())
        if not count or before.known is None:
            return None
        # The texts of the reference hide as large a share of the new ones as they fill, and of those that came once.
        visible = max(1.0 - np.count_nonzero(before.known) / _KNOWN_TEXTS, 1.0 / _KNOWN_TEXTS)
        share = float(min(1.0, now.new / visible / count))
        # The share of texts that came once estimates the share of unseen ones (Good, 1953); one more is no surprise.
        once = min(count_before, (np.count_nonzero(before.known == 1) + 1) / visible)
        is_large = share > max(self.limits.new_values, once / count_before)
        if count >= _VALUES_MIN and is_large and self._differ(share * count, count, once, count_before):
            shifted.append("new values")
        return share

    def _differ(self, some: float, of: int, some_before: float, of_before: int) -> bool:
        """Whether two shares differ by more than chance, by the likelihood ratio: it is right for small ones, too."""
        both = (some + some_before) / (of + of_before)
        ratio = sum(
            observed * math.log(observed / (total * share))
            for observed, total, share in (
                (some, of, both),
                (of - some, of, 1.0 - both),
                (some_before, of_before, both),
                (of_before - some_before, of_before, 1.0 - both),
            )
            if observed > 0.0
        )
        return 2.0 * ratio > self.deviations**2

    def _psi(self, counts: Indices, shifted: list[Reason]) -> tuple[float, float] | None:
        totals = counts.sum(axis=1)
        if totals.min() < _VALUES_MIN:
            return None
        groups = min(_GROUPS_OF_PSI, int(totals.min()) // _VALUES_IN_A_GROUP)
        # A value is in the group of the middle of its mass in the reference.
        middle = np.cumsum(counts[0]) - counts[0] / 2.0
        group = np.minimum((middle * groups / totals[0]).astype(np.intp), groups - 1)
        first = np.flatnonzero(np.diff(group, prepend=-1))
        # Half a value more in each group, so that an empty one has a logarithm.
        shares = np.add.reduceat(counts, first, axis=1) + 0.5
        shares /= shares.sum(axis=1, keepdims=True)
        psi = float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())
        # Yurdakul (2018); the quantile of chi square by Wilson and Hilferty (1931).
        freedom = len(first) - 1
        part = 2.0 / (9.0 * freedom) if freedom else 1.0
        quantile = freedom * (1.0 - part + self.deviations * math.sqrt(part)) ** 3
        limit = max(self.limits.psi, quantile * float((1.0 / totals).sum()))
        if psi > limit:
            shifted.append("psi")
        return psi, limit

    def _ks(self, counts: Indices, shifted: list[Reason], *, is_exact: bool) -> tuple[float, float] | None:
        totals = counts.sum(axis=1)
        if totals.min() < _VALUES_MIN:
            return None
        until = np.cumsum(counts, axis=1) / totals[:, None]
        ks = float(np.abs(until[0] - until[1]).max())
        start = until - counts / totals[:, None]
        at_most = ks if is_exact else float(np.maximum(until[0] - start[1], until[1] - start[0]).max())
        # The limit of Smirnov for two samples.
        noise = math.sqrt(-math.log(self.chance / 2.0) / 2.0 * float((1.0 / totals).sum()))
        if ks > max(self.limits.ks, noise):
            shifted.append("ks")
        return ks, at_most


def _aligned(before: GroupCounts, now: GroupCounts) -> Indices:
    """Return the counts of both, in two rows, with a column for each group that one of them has."""
    level = max(before.level, now.level)
    before, now = before.at(level), now.at(level)
    groups, _ = _runs(np.sort(np.concatenate([before.groups, now.groups])))
    counts = np.zeros((2, len(groups)), np.intp)
    for row, each in enumerate((before, now)):
        counts[row, np.searchsorted(groups, each.groups)] = each.counts
    return counts
