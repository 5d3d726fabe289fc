"""The fields that a model knows, and how it reads each: decided in the order of the rows, and published with the model.

Readers of rows tell what each text can be; here ``streamiter.values.field_states`` decides what its field is. So
neither the cut of batches nor the number of readers changes what a field is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, shortened
from streamiter.values.field_kinds import (
    DATE,
    NO_KINDS,
    NO_VALUE,
    OTHER,
    PADDED,
    PARTS,
    TREND,
    Kind,
    Readings,
    checked_kinds,
    part_of,
    parts_of_times,
    preparation_of,
    time_zone_of,
    times_of_values,
)
from streamiter.values.field_states import (
    OTHERS_MAX,
    TEXTS_THAT_DECIDE,
    AsRead,
    FieldState,
    FieldValues,
    as_known,
    as_learned,
    first_of,
    of_plain_values,
)
from streamiter.values.hashes import place_of_missing, place_of_text
from streamiter.values.named_rows import ABSENT, NamedRows, is_missing
from streamiter.values.numbers import Floats, Truths

_log = logging.getLogger("streamiter.learn")

_CATEGORY: Final = FieldState("category")
_NEW: Final = FieldState()


class BadKind(NamedTuple):
    """Values of a wrong kind in a field."""

    field: str
    rows: Truths
    expected: str
    """Such as ``a number``."""
    given: str
    start: str
    """The message before what was given."""
    remedy: str

    def reason(self, record: object = None) -> str:
        """Return the whole message; with the record that one of the rows was read from, it shows the value."""
        return f"{self.start}, given {self.given_in(record)}; {self.remedy}"

    def given_in(self, record: object) -> str:
        """Return what was given, with the value of the record, if it is known."""
        is_known = isinstance(record, Mapping) and self.field in record
        return f"{shortened(record[self.field])}, {self.given}" if is_known else self.given  # type: ignore[index]


Refuse = Callable[[BadKind], Exception]
"""Makes the error for the rows of a wrong kind."""


def _first_error(bad: list[BadKind], refuse: Refuse | None) -> Exception:
    """Return the error of the field with the first wrong row."""
    first = min(bad, key=lambda each: (first_of(each.rows), each.field))
    return ModelError(first.reason()) if refuse is None else refuse(first)


class KnownFields:
    """The fields of a model: the columns of numbers, the fields of texts, and what each field is.

    ``kinds`` are those that the user decides. ``bits`` are those of the hash. The numbers of :meth:`learn` count from
    :meth:`keep` on.

    >>> from streamiter.values.named_rows import FieldReader
    >>> known, reader = KnownFields("model", 10), FieldReader(bits=10)
    >>> rows = known.learn(reader.rows([{"km": "7.5", "town": "Rome"}, {"km": "", "town": "Oslo"}]))
    >>> rows.fields, rows.numbers.tolist(), rows.text_fields, rows.missing.tolist()
    (('km',), [[7.5], [nan]], ('town',), [0, 1])
    """

    def __init__(self, owner: str, bits: int, kinds: Any = NO_KINDS, time_zone: str | None = None) -> None:
        self._owner = owner
        self._bits = bits
        self.asked = checked_kinds(owner, kinds)
        """The kinds that the user has decided."""
        self.time_zone = time_zone
        self.zone: tzinfo | None = time_zone_of(owner, time_zone)
        self.columns: dict[str, int] = {}
        """The number of each field of numbers among the numeric columns."""
        self.texts: dict[str, None] = {}
        """The fields of texts."""
        self._asked_states = {
            field: FieldState("category" if preparation_of(kind) else kind, is_in_texts=True)
            for field, kind in self.asked.items()
        }
        self._states: dict[str, FieldState] = {**self._asked_states}
        self._next: dict[str, FieldState] = {}
        self._said = set(self.asked)
        """The fields whose kind needs no line in the log any more."""
        self.places_of_parts: dict[str, npt.NDArray[np.intp]] = {}
        """By part of a time, the places of all of its values, from 0 on."""
        self.parts_of_times: dict[str, str] = {}
        """By trend of a time its field, and "" by its other parts; of the times so far."""

    # ---- rows

    def learn(self, rows: NamedRows, refuse: Refuse | None = None) -> NamedRows:
        """Return the rows with each value as its field is read; :meth:`add` gives new fields their columns.

        Raises the error of ``refuse`` for rows with a value of a wrong kind: of several fields, for the one with the
        first of these rows, since a refused row says nothing about its other fields.
        """
        self._next = {}
        read: dict[str, AsRead] = {}
        bad: list[BadKind] = []
        for field, is_plain in self._fields_to_read(rows):
            values, state = _values_of(rows, field), self._states.get(field, _NEW)
            if is_plain and (after := of_plain_values(state, values)) is not None:
                self._next[field] = after
                continue
            as_read, after = as_learned(state, values)
            read[field] = as_read
            if after != state:
                self._next[field] = after
            if as_read.wrong.any():
                bad.append(self._bad_kind(field, after, values, as_read.wrong))
        if bad:
            self._next = {}
            raise _first_error(bad, refuse)
        for field, after in self._next.items():
            self._states[field] = after.without_counts(self._states.get(field, _NEW))
        return self._rebuilt(rows, read)

    def of(self, rows: NamedRows, refuse: Refuse | None = None) -> NamedRows:
        """Return the rows with each value as its field is read now; unknown fields are left out."""
        read: dict[str, AsRead] = {}
        bad: list[BadKind] = []
        for field, _ in self._fields_to_read(rows):
            values, state = _values_of(rows, field), self._states.get(field, _NEW)
            has_column, in_texts = self._is_live(field), field in self.texts
            read[field] = as_read = as_known(state, values, has_column=has_column, in_texts=in_texts)
            if as_read.wrong.any():
                kind = state._replace(kind=state.leading if not in_texts else "category")
                bad.append(self._bad_kind(field, kind, values, as_read.wrong))
        if bad:
            raise _first_error(bad, refuse)
        return self._rebuilt(rows, read)

    def keep(self) -> None:
        """Keep what the rows of the last :meth:`learn` have said about their fields."""
        for field, after in self._next.items():
            before, self._states[field] = self._states[field], after
            is_decided = before.kind is None and after.kind is not None
            if after.kind is not None:
                self._forget_others(field, after.kind)
            self._say(field, after, is_decided=is_decided)
        self._next = {}

    def _fields_to_read(self, rows: NamedRows) -> list[tuple[str, bool]]:
        """Return the fields with values that are not simply those of the field's kind.

        With each field, whether its values are plain numbers, or texts that can be nothing else.
        """
        states, texts = self._states, dict.fromkeys(rows.text_fields)
        in_both = texts.keys() & set(rows.fields)
        fields = dict.fromkeys(rows.readings, False) | dict.fromkeys(in_both, False)
        for kind, names in (("number", rows.fields), ("category", texts)):
            for field in names:
                if field not in fields and states.get(field, _NEW).kind != kind:
                    fields[field] = True
        return list(fields.items())

    def _rebuilt(self, rows: NamedRows, read: Mapping[str, AsRead]) -> NamedRows:
        numbers = dict(zip(rows.fields, rows.numbers.T, strict=True))
        width = len(rows.text_fields)
        places: list[tuple[str, Any]] = list(zip(rows.text_fields, rows.places.T[:width], strict=True))
        flags = list(rows.places.T[width:])
        missing = rows.missing
        is_changed = False
        for field, as_read in read.items():
            readings, given = rows.readings.get(field), numbers.get(field)
            is_missing_now = as_read.missing
            if given is not None and not (as_read.number | is_missing(given)).all():
                numbers[field] = np.where(as_read.number, given, np.nan)
                is_changed = True
            if readings is not None and (of_texts := as_read.number & (readings.codes >= PADDED)).any():
                numbers[field] = np.where(of_texts, readings.values, numbers.get(field, np.nan))
                is_missing_now = is_missing_now | (of_texts & is_missing(readings.values))
                is_changed = True
            if as_read.time.any():
                ms = times_of_values(readings, given, as_read.time, self.zone)
                is_missing_now = is_missing_now | (as_read.time & np.isnan(ms))
                self._add_times(field, ms, readings, numbers, places)
                is_changed = True
            if any(name == field for name, _ in places) and not (as_read.text | ~_has_place(rows, field)).all():
                kept = as_read.text
                places = [
                    (name, np.where(kept, column, ABSENT) if name == field else column)
                    for name, column in places
                    if name != field or kept.any()
                ]
                is_changed = True
            if is_missing_now.any():
                flags.append(np.where(is_missing_now, place_of_missing(field, self._bits), ABSENT))
                missing = missing + is_missing_now
                is_changed = True
        if not is_changed:
            return rows
        hashed = [*(column for _, column in places), *flags]
        return NamedRows(
            tuple(numbers),
            np.column_stack(list(numbers.values())) if numbers else np.empty((len(rows), 0)),
            tuple(name for name, _ in places),
            np.column_stack(hashed) if hashed else np.empty((len(rows), 0), np.intp),
            missing,
        )

    def _add_times(
        self,
        field: str,
        ms: Floats,
        readings: Readings | None,
        numbers: dict[str, Floats],
        places: list[tuple[str, Any]],
    ) -> None:
        """Add hour, weekday, month and trend of times; NaN is no time."""
        is_there = ~np.isnan(ms)
        parts, trend = parts_of_times(np.where(is_there, ms, 0.0))
        for part, values in parts.items():
            name = part_of(field, part)
            has_part = is_there
            if part == "hour" and readings is not None:
                has_part = is_there & (readings.codes != DATE)
            if (known := self.places_of_parts.get(name)) is None:
                known = np.array(
                    [place_of_text(name, str(value), self._bits) for value in range(PARTS[part].stop)], np.intp
                )
                self.places_of_parts[name] = known
                self.parts_of_times |= {name: "", part_of(field, TREND): field}
            places.append((name, np.where(has_part, known[values], ABSENT)))
        numbers[part_of(field, TREND)] = np.where(is_there, trend, np.nan)

    def add(self, rows: NamedRows) -> int:
        """Give each new field a column when it has its first number, in an order that no cut of batches changes.

        Returns the number of new columns.
        """
        new = []
        for position, field in enumerate(rows.fields):
            if field not in self.columns:
                first = first_of(~is_missing(rows.numbers[:, position]))
                if first < len(rows):
                    new.append((first, len(field), field))
        for _, _, field in sorted(new):
            self.columns[field] = len(self.columns)
        for position, field in enumerate(rows.text_fields):
            if field not in self.texts and (rows.places[:, position] != ABSENT).any():
                self.texts[field] = None
        return len(new)

    def _bad_kind(self, field: str, state: FieldState, values: FieldValues, wrong: Truths) -> BadKind:
        row = first_of(wrong)
        given = "a number" if values.is_number[row] else "a time" if values.is_moment[row] else "a text"
        expected = f"a {state.kind}" if state.kind in ("number", "time") else "a text"
        why, remedy = "as in the first row that had it", "convert it before"
        if field in self.asked:
            why = "as kinds= says, in a service features or kinds of [learn]"
            remedy = "name another kind there, or convert it before"
        elif state.is_in_texts or state.times:
            why = "as in its first rows"
            if given == "a text" != expected:
                remedy = (
                    f"kinds={{{field!r}: 'category'}}, in a service learn.kinds, reads all of its texts as categories"
                )
        if given == "a text" and state.is_in_texts and expected != given:
            given = f"a text that is no {state.kind}"
        start = f"{self._owner}: expected {expected.removeprefix('a ')}s in the field {field!r}"
        return BadKind(field, wrong, expected, given, f"{start}, {why}", remedy)

    # ---- what fields are

    def leave_out(self, fields: Iterable[str]) -> None:
        """Leave out fields that the label is made of, in all rows from here on."""
        new = [field for field in fields if self._states.get(field, _NEW).kind != "label"]
        for field in new:
            # The trend of a field of times is no live column any more.
            self._states[field] = FieldState("label", has_times=self._states.get(field, _NEW).has_times)
            self._forget_others(field, "label")
        if new:
            _log.info(
                "%s: the label is made of %s, so this is no feature; features= with the names of all decides otherwise",
                self._owner,
                " and ".join(map(repr, new)),
            )

    def _is_live(self, column: str) -> bool:
        """Whether rows can still have a number in this column."""
        return column in self.columns and self._states.get(column, FieldState("number")).leading == "number"

    def _forget_others(self, field: str, kind: str) -> None:
        """Forget what a field has been before it was decided; its weights have no influence from here on."""
        if kind != "category":
            self.texts.pop(field, None)
        if kind != "time":
            for part in PARTS:
                self.texts.pop(part_of(field, part), None)

    def _say(self, field: str, state: FieldState, *, is_decided: bool) -> None:
        """Say in the log, once, what a field is that has numbers or times as texts, and what was decided."""
        advice = f"kinds={{{field!r}: …}} decides otherwise"
        if state.leading in ("number", "time") and field not in self._said and (state.is_in_texts or state.has_times):
            self._said.add(field)
            how = "as a number" if state.leading == "number" else "as a time: hour, weekday, month and trend"
            _log.info("%s: the field %r is read %s; %s", self._owner, field, how, advice)
        if not is_decided:
            return
        reason = f"of its first {TEXTS_THAT_DECIDE} values"
        if state.kind != "category" and state.others:
            reason = f"{state.others} {reason} are no {state.kind}s; from here on it refuses such texts"
        elif state.kind == "category" and state.numbers + state.times:
            found = f"{state.numbers} are numbers, {state.times} times and {state.others} other texts"
            reason = f"{reason} {found}, so it is a category from here on"
        elif state.alike > OTHERS_MAX:
            alike = "look like numbers, with a comma, a unit or zeros before them"
            advice += "; numbers with a comma or a unit must be converted before"
            reason = f"it is a category, and {state.alike} {reason} {alike}"
        else:
            return
        _log.warning("%s: the field %r: %s; %s", self._owner, field, reason, advice)

    # ---- publishing and state

    def dead_columns(self) -> list[int]:
        """Return the columns that no row can have any more."""
        trends = {part_of(field, TREND): state for field, state in self._states.items() if state.has_times}
        return [
            number
            for column, number in self.columns.items()
            if not (self._is_live(column) if column not in trends else trends[column].leading == "time")
        ]

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of fields whose values are prepared otherwise than their types say."""
        kinds = {field: kind for field, kind in self.asked.items() if self._states[field].kind != "label"}
        for field, state in self._states.items():
            if state.leading == "time" or (state.leading == "number" and state.is_in_texts):
                kinds[field] = state.leading
        return kinds

    def published(self) -> dict[str, Any]:
        """Return the entries of a published model, beside its arrays without the dead columns."""
        dead, kinds = set(self.dead_columns()), self.kinds
        entries: dict[str, Any] = {
            "fields": [column for column, number in self.columns.items() if number not in dead],
            "text_fields": sorted(self.texts),
        }
        if kinds:
            entries["kinds"] = kinds
        if self.time_zone is not None:
            entries["time_zone"] = self.time_zone
        return entries

    def start_from(self, published: Mapping[str, Any], *, keeps: bool = False) -> None:
        """Take on the fields of a published model; with ``keeps`` also the fields that are read as another kind now.

        Raises ModelError, without ``keeps``, for fields that only ``kinds`` can make the readers read as that model
        did, and for times of another time zone.
        """
        kinds, zone = published.get("kinds", {}), published.get("time_zone")
        if not keeps:
            if missing := {field: kind for field, kind in of_reader(kinds).items() if field not in self.asked}:
                raise ModelError(
                    f"{self._owner}: expected kinds={missing}, as in the published model; give them, or others"
                )
            if "time" in kinds.values() and zone != self.time_zone:
                raise ModelError(
                    f"{self._owner}: expected time_zone={zone!r}, as in the published model, given {self.time_zone!r}"
                )
        self._take_on(published["fields"], published["text_fields"], field_states_of(published), kinds, zone)

    def _take_on(
        self,
        columns: Sequence[str],
        texts: Sequence[str],
        states: dict[str, FieldState],
        kinds: Mapping[str, Kind],
        zone: str | None,
    ) -> None:
        """Take on fields that were read by these kinds; a field that is read as another kind now starts empty."""
        self.columns = {field: number for number, field in enumerate(columns)}
        self.texts = dict.fromkeys(texts)
        changed = []
        for field in [*self.asked, *(each for each in of_reader(kinds) if each not in self.asked)]:
            own = self.asked.get(field)
            if field in states:
                before = of_reader(kinds).get(field) or states[field].leading or "category"
                if own != before:
                    changed.append(field)
            states[field] = self._asked_states.get(field, _NEW)
            if own is not None and preparation_of(own) is None:
                self.texts.pop(field, None)
        if zone != self.time_zone:
            changed += [field for field, state in states.items() if state.leading == "time" and field not in changed]
        if changed:
            _log.warning(
                "%s: fields of the earlier model are read in another way now, so what it has learned of them is not "
                "used, or does not fit: %s",
                self._owner,
                ", ".join(map(repr, changed)),
            )
        self._states, self._next = states, {}
        self._said |= {field for field, state in states.items() if state.leading in ("number", "time")}

    def state(self) -> dict[str, Any]:
        """Return a copy of everything as plain data."""
        return {
            "fields": list(self.columns),
            "text fields": sorted(self.texts),
            "field states": {field: tuple(state) for field, state in self._states.items()},
            "kinds": {**self.asked},
            "time zone": self.time_zone,
        }

    def has_settings_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a :meth:`state` is of a model with the same kinds and the same time zone."""
        return bool((state["kinds"], state["time zone"]) == (self.asked, self.time_zone))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`; one of other kinds, or another time zone, as :meth:`start_from` with ``keeps``."""
        states = {field: FieldState(*values) for field, values in state["field states"].items()}
        if self.has_settings_of(state):
            self.columns = {field: number for number, field in enumerate(state["fields"])}
            self.texts = dict.fromkeys(state["text fields"])
            self._states, self._next = states, {}
            self._said |= {field for field, each in states.items() if each.leading in ("number", "time")}
        else:
            self._take_on(state["fields"], state["text fields"], states, state["kinds"], state["time zone"])


def field_states_of(published: Mapping[str, Any]) -> dict[str, FieldState]:
    """Return what the fields of a published model are."""
    kinds, texts = published.get("kinds", {}), frozenset(published["text_fields"])
    states = {field: FieldState("number") for field in published["fields"]} | dict.fromkeys(texts, _CATEGORY)
    for field, kind in kinds.items():
        if preparation_of(kind) is not None:
            states[field] = _CATEGORY
        elif field in texts:  # It was published before its kind was decided.
            is_number = kind == "number"
            counts = {"numbers": int(is_number), "times": int(not is_number), "others": 1}
            states[field] = FieldState(None, is_number, not is_number, True, **counts, has_text=True)
        else:
            states[field] = FieldState(kind, is_in_texts=True)
    return states


def of_reader(kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the kinds that a reader needs to know; all others are decided after it."""
    return {field: kind for field, kind in kinds.items() if preparation_of(kind) is not None}


def published_fields(owner: str, bits: int, published: Mapping[str, Any]) -> KnownFields:
    """Return the fields of a published model, for its predictor. Raises ModelError for kinds that are not known."""
    try:
        kinds = checked_kinds(owner, published.get("kinds", NO_KINDS))
        known = KnownFields(owner, bits, of_reader(kinds), published.get("time_zone"))
    except ConfigurationError as error:
        raise ModelError(f"{error}; the model is of a newer version of streamiter, or damaged") from None
    known.start_from(published)
    return known


# ---- the values of a field


def _values_of(rows: NamedRows, field: str) -> FieldValues:
    has_place = _has_place(rows, field)
    codes = np.where(has_place, OTHER, NO_VALUE).astype(np.uint8)
    if (readings := rows.readings.get(field)) is not None:
        codes = readings.codes.copy()
        codes[(codes == OTHER) & ~has_place] = NO_VALUE  # An empty list.
    is_number = np.zeros(len(rows), np.bool_)
    if field in rows.fields:
        is_number = ~is_missing(rows.numbers[:, rows.fields.index(field)])
    return FieldValues(codes, is_number, has_place)


def _has_place(rows: NamedRows, field: str) -> Truths:
    # Of a field with several columns, each row has its first text in the first one.
    if field not in rows.text_fields:
        return np.zeros(len(rows), np.bool_)
    has_place: Truths = rows.places[:, rows.text_fields.index(field)] != ABSENT
    return has_place
