"""Fields under watch: each window of rows is compared with a reference, the first rows.

A loss rises when labels have come; a field that is missing, or has other values, is seen before. What is compared, and
when a difference is no chance, says ``streamiter.values.field_profiles``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import numpy as np

from streamiter.errors import ConfigurationError, shortened
from streamiter.operators.declared_state import DeclaredState, declared
from streamiter.values.field_profiles import ComparedField, FieldProfiles, ShiftLimits, compared
from streamiter.values.named_rows import NamedRows
from streamiter.values.numbers import Indices, checked_number, whole_number
from streamiter.values.records import OutputTag

# Of fewer rows, groups of values have too few to compare.
ROWS_MIN: Final = 100
# Neighbours are copied faster than single rows.
_BLOCK: Final = 256
# Multiples of the golden ratio, modulo 1, are spread evenly, and have no period (Knuth, volume 3, 6.4).
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class FieldWatch(ShiftLimits):
    """Compares the rows of each ``window`` with the ``reference``, the first rows. Both are numbers of rows.

    Of a window only a ``sample`` is looked at, this share of its rows: blocks of 256 rows, chosen by their numbers. It
    has 10,000 rows, which say as much as the reference, and costs a fifth. Give 1.0 with a smaller window.
    ``psi``, ``ks``, ``missing`` and ``new_values`` are the limits: a field *has shifted* in a window if one of these
    measures is above its limit, and above what chance explains. ``without`` are fields that are not watched, such as
    a number that only grows. Another ``name`` takes the next rows as the reference when the job starts again.

    Raises ConfigurationError for windows of fewer than 100 rows, limits that are not above 0, and shares above 1.

    >>> FieldWatch(window=50)
    Traceback (most recent call last):
        ...
    streamiter.errors.ConfigurationError: FieldWatch(window=): expected a whole number of at least 100, given 50
    """

    reference: int = 10_000
    window: int = 50_000
    sample: float = 0.2
    without: Collection[str] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for option in ("reference", "window"):
            whole_number(f"FieldWatch({option}=)", getattr(self, option), ROWS_MIN)
        for share in ("sample", "ks", "missing", "new_values"):
            expected = "a share above 0 and at most 1"
            checked_number(f"FieldWatch({share}=)", getattr(self, share), expected, lambda given: 0.0 < given <= 1.0)
        checked_number("FieldWatch(psi=)", self.psi, "a number above 0", lambda psi: psi > 0.0)
        if self.sample * self.window < ROWS_MIN:
            raise ConfigurationError(
                f"FieldWatch(window=): expected a window whose sample has at least {ROWS_MIN} rows, given "
                f"{self.window} with sample={self.sample!r}; give sample=1.0, or a larger window"
            )


class FieldReport(TypedDict):
    """A window of rows, compared with the reference: plain data."""

    first_row: int
    """The number of the first row of the window; the rows of the reference begin with 0."""
    rows: int
    """The number of rows of the window."""
    sampled: int
    """The number of rows that were looked at."""
    reference_rows: int
    name: str
    """The name of the reference."""
    fields: list[ComparedField]
    left_out: int
    """The number of values of fields that are not watched, because there are too many fields."""


FIELD_REPORTS: Final = OutputTag("fields")
"""The side output of a learner: a :class:`FieldReport` for each window."""


def compare_profiles(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]], limits: ShiftLimits | None = None
) -> list[ComparedField]:
    """Compare the values of two windows, field by field; ``limits``: a :class:`FieldWatch` with other limits.

    Both are the aggregates ``"profile"`` of a window by the names of fields, as in ``aggregate(km=("profile",
    "km"))``. ``new_values`` is None: only a watch of a learner counts them; a shift of texts shows in ``psi``.

    >>> from streamiter import Flow, tumbling
    >>> flow = Flow("trips")
    >>> rows = [{"at": at, "km": at % 50 + (25 if at > 3_599 else 0), "sky": "sun"} for at in range(7_200)]
    >>> hours = flow.from_items(rows).event_time("at", unit="s", check_unit=False).key_by(lambda row: "all")
    >>> hours = hours.window(tumbling(3_600)).aggregate(km=("profile", "km"), sky=("profile", "sky")).collect()
    >>> state = flow.run().state
    >>> [(each["field"], each["shifted"]) for each in compare_profiles(*(hour.value for hour in hours.items))]
    [('km', ['psi', 'ks']), ('sky', [])]
    """
    return compared(_of_window(before), _of_window(now), limits)


def _of_window(profiles: Mapping[str, Mapping[str, Any]]) -> FieldProfiles:
    if not all(isinstance(each, Mapping) and "records" in each for each in profiles.values()):
        raise ConfigurationError(
            'compare_profiles: expected the profiles of a window by field, as of aggregate(km=("profile", "km")), '
            f"given {shortened(profiles)}"
        )
    rows = max((each["records"] for each in profiles.values()), default=0)
    return FieldProfiles.of_state({"rows": rows, "left out": 0, "fields": profiles})


class WatchedFields(DeclaredState):
    """Compares windows of rows with the first rows.

    ``bits`` are those of the hashes of texts. A state of another reference is not taken on.

    >>> from streamiter.values.named_rows import FieldReader
    >>> watch, reader = FieldWatch(reference=500, window=500, sample=1.0), FieldReader(bits=18)
    >>> watched = WatchedFields(watch, bits=18)
    >>> rows = [{"km": float(n % 50), "sky": "sun" if n % 3 else "rain"} for n in range(1_000)]
    >>> rows += [{"km": n % 50 + 20.0, "sky": None if n % 9 else "sun"} for n in range(600)]
    >>> for report in watched.add(reader.rows(rows)):
    ...     print(report["first_row"], {each["field"]: each["shifted"] for each in report["fields"]})
    500 {'km': [], 'sky': []}
    1000 {'km': ['psi', 'ks'], 'sky': ['missing', 'psi']}
    """

    _rows = declared(0)
    """The number of rows so far."""
    _first_row = declared(0)
    """The number of the first row of the window."""

    def __init__(self, watch: FieldWatch, bits: int) -> None:
        self._watch = watch
        self._bits = bits
        self._size = [watch.window, watch.sample]
        self._reference: FieldProfiles | None = None
        self._window = FieldProfiles()

    def add(self, rows: NamedRows, parts: Mapping[str, str] | None = None) -> list[FieldReport]:
        """Add rows; return the windows that they complete. ``parts`` are those of ``FieldProfiles.add``."""
        reports: list[FieldReport] = []
        parts = {**(parts or {}), **dict.fromkeys(self._watch.without, "")}
        start = 0
        while start < len(rows):
            size = self._watch.reference if self._reference is None else self._watch.window
            stop = min(len(rows), start + self._first_row + size - self._rows)
            chosen = self._sample(start, stop)
            if len(chosen):
                self._window.add(rows if len(chosen) == len(rows) else rows[chosen], parts)
            self._rows += stop - start
            if self._rows == self._first_row + size:
                reports += self._complete()
            start = stop
        return reports

    def _sample(self, start: int, stop: int) -> Indices:
        """Return which of these rows to look at."""
        places = np.arange(start, stop)
        if self._reference is None or self._watch.sample == 1.0:
            return places
        blocks = ((places - start + self._rows) // _BLOCK).astype(np.uint64)
        return places[blocks * _GOLDEN < np.uint64(self._watch.sample * 2.0**64)]

    def _complete(self) -> list[FieldReport]:
        window, reference, first_row = self._window, self._reference, self._first_row
        self._reference = reference or window
        self._window, self._first_row = FieldProfiles(self._reference), self._rows
        if reference is None:
            return []
        return [
            {
                "first_row": first_row,
                "rows": self._rows - first_row,
                "sampled": window.rows,
                "reference_rows": reference.rows,
                "name": self._watch.name,
                "fields": compared(reference, window, self._watch),
                "left_out": window.left_out,
            }
        ]

    def _of_reference(self) -> list[Any]:
        return [self._watch.name, self._watch.reference, self._bits, sorted(self._watch.without)]

    def state(self) -> dict[str, Any]:
        """Return a copy of everything as plain data."""
        reference = self._reference and self._reference.state()
        window = {"window": self._window.state(), "size": self._size}
        return super().state() | {"of": self._of_reference(), "reference": reference, **window}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`, unless its reference is another; a window of another size begins again."""
        if list(state["of"]) != self._of_reference():
            return
        super().restore(state)
        self._reference = state["reference"] and FieldProfiles.of_state(state["reference"])
        self._window = FieldProfiles.of_state(state["window"], self._reference)
        if self._reference is not None and state["size"] != self._size:
            self._first_row, self._window = self._rows, FieldProfiles(self._reference)
