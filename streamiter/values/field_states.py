"""What a field is, as decided by its values in the order of the rows, and how each of these values is read.

The first hundred texts of a field decide: it is a field of numbers, or of times, if at most ten of them are other
texts; otherwise it is a field of categories. Until then each text is read as what it is. A number or a time that is no
text decides at once. Pure functions: where a batch is cut makes no difference to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.values.field_kinds import BLANK, DATE, NEAR_NUMBER, NO_VALUE, OTHER, PADDED, PLAIN_NUMBER, Kind
from streamiter.values.numbers import Truths

TEXTS_THAT_DECIDE: Final = 100
"""How many texts of a field decide what it is. Fewer would often have no text of a rare other kind."""
OTHERS_MAX: Final = 10
"""How many of them may be other texts in a field of numbers or times: a word for a missing value, or damaged ones."""

Codes = npt.NDArray[np.uint8]


class FieldState(NamedTuple):
    """What is known of a field.

    The counts, and the kind that they decide, are of rows that were learned from. The other entries are of all rows
    that were not refused for their values, since a row is refused for its label later, and its batch is read again.
    """

    kind: Kind | Literal["label"] | None = None
    """How it is read; None: each text as what it is; "label": not at all, since the label is made of it."""
    is_in_texts: bool = False
    """Whether its numbers come as texts, too; a field of numbers refuses all texts before the first of these."""
    has_times: bool = False
    """Whether it had a time."""
    has_others: bool = False
    """Whether it had another text."""
    numbers: int = 0
    """How many of its first values were numbers."""
    times: int = 0
    others: int = 0
    """How many were other texts."""
    alike: int = 0
    """How many of these look like numbers: with a comma or a unit, or with zeros before them."""
    has_text: bool = False
    """Whether a text was read as a category, also a blank one."""

    @property
    def leading(self) -> Kind | Literal["label"] | None:
        """The kind that the field has now, or that it will have if nothing changes; None: it has no number, no time."""
        if self.kind is None:
            return "time" if self.times > self.numbers else "number" if self.numbers else None
        return self.kind

    def without_counts(self, before: FieldState) -> FieldState:
        """Return what is known at once, with the counts from before the rows."""
        kept = before.kind if self.numbers + self.times + self.others >= TEXTS_THAT_DECIDE else self.kind
        return FieldState(kept, self.is_in_texts, self.has_times, self.has_others, *before[4:])


class FieldValues(NamedTuple):
    """The values of a field in a batch, as a reader has found them."""

    codes: Codes
    is_number: Truths
    """Which values are numbers, and no texts."""
    has_place: Truths
    """Which values are texts."""

    @property
    def is_moment(self) -> Truths:
        """Which values are times, and no texts."""
        return (self.codes >= DATE) & ~self.has_place


class AsRead(NamedTuple):
    """How each value of a field is read; a value that is in no array is left out."""

    number: Truths
    time: Truths
    text: Truths
    missing: Truths
    wrong: Truths

    def joined(self, other: AsRead, start: int) -> AsRead:
        """Return these values up to ``start``, and the others from there."""
        return AsRead(*(np.concatenate([mine[:start], its[start:]]) for mine, its in zip(self, other, strict=True)))


def of_plain_values(state: FieldState, values: FieldValues) -> FieldState | None:
    """Return what is known of a field without numbers and times after plain values; None: each must be looked at."""
    if state.kind is not None or state.is_in_texts or state.has_times:
        return None
    if not values.has_place.any():
        return None if state.has_others or not values.is_number.any() else FieldState("number")
    others = state.others + int(np.count_nonzero(values.has_place))
    kind: Kind | None = "category" if others >= TEXTS_THAT_DECIDE else None
    return state._replace(kind=kind, has_others=True, others=min(others, TEXTS_THAT_DECIDE), has_text=True)


def as_learned(state: FieldState, values: FieldValues) -> tuple[AsRead, FieldState]:
    """Return how the values are read, and what is known of the field after them."""
    if state.kind is not None:
        return _decided(state, values)
    codes, is_number, is_moment = values.codes, values.is_number, values.is_moment
    rows = np.arange(len(codes))
    has_values = state.is_in_texts or state.has_times or state.has_others
    first = first_of(is_number | ((codes != NO_VALUE) & (codes != BLANK)))
    if not has_values and first < len(rows) and (is_number[first] or is_moment[first]):
        # It decides at once; blank texts before it are categories.
        before, _ = _undecided(state, values, rows)
        decided = FieldState("number") if is_number[first] else FieldState("time", has_times=True)
        as_read, after = _decided(decided, values)
        return before.joined(as_read, first), after
    as_read, votes = _undecided(state, values, rows)
    if not len(rows):
        return as_read, state
    counts = np.cumsum(votes, axis=1) + np.array([[state.numbers], [state.times], [state.others]])
    end = first_of(counts.sum(axis=0) >= TEXTS_THAT_DECIDE)
    numbers, times, others = counts[:, min(end, len(rows) - 1)].tolist()
    seen = slice(0, end + 1)
    after = FieldState(
        None,
        state.is_in_texts or bool((codes[seen] == PLAIN_NUMBER).any()),
        state.has_times or bool(as_read.time[seen].any()),
        state.has_others or bool(votes[2, seen].any()),
        numbers,
        times,
        others,
        state.alike + int(np.count_nonzero((codes[seen] == NEAR_NUMBER) | (codes[seen] == PADDED))),
        state.has_text or bool(as_read.text[seen].any()),
    )
    if end == len(rows):
        return as_read, after
    least = TEXTS_THAT_DECIDE - OTHERS_MAX
    kind: Kind = "number" if numbers >= least else "time" if times >= least else "category"
    later, after = _decided(after._replace(kind=kind), values)
    if as_read.wrong[seen].any():
        # Without the rows that are refused now, other rows may decide.
        later = later._replace(wrong=np.zeros_like(later.wrong))
    return as_read.joined(later, end + 1), after


def _undecided(state: FieldState, values: FieldValues, rows: npt.NDArray[np.intp]) -> tuple[AsRead, Truths]:
    """Return how values are read each as what it is, and for each value whether it is a number, a time or another."""
    codes, is_number, is_moment = values.codes, values.is_number, values.is_moment
    is_text_number, is_text_time = codes == PLAIN_NUMBER, (codes >= DATE) & values.has_place
    number = is_text_number | (is_number & ((rows > first_of(is_text_number)) | state.is_in_texts))
    time = is_text_time | (is_moment & ((rows > first_of(is_text_time)) | state.has_times))
    other = (codes == OTHER) | (codes == NEAR_NUMBER) | (codes == PADDED)
    blank = codes == BLANK
    value_before = (rows > first_of(number | time)) | (state.numbers + state.times > 0)
    text_before = (rows > first_of(other | (blank & ~value_before))) | state.has_text
    missing = blank & value_before & ~text_before
    wrong = (is_number & ~number) | (is_moment & ~time)
    return AsRead(number, time, other | (blank & ~missing), missing, wrong), np.array([number, time, other])


def _decided(state: FieldState, values: FieldValues) -> tuple[AsRead, FieldState]:
    codes, is_number, is_moment = values.codes, values.is_number, values.is_moment
    none = np.zeros(len(codes), np.bool_)
    if state.kind == "label":
        return AsRead(none, none, none, none, none), state
    if state.kind == "category":
        return AsRead(none, none, values.has_place, none, is_number | is_moment), state
    blank = codes == BLANK
    if state.kind == "time":
        wrong = (codes == OTHER) | (codes == NEAR_NUMBER)
        return AsRead(none, is_number | (codes >= PADDED), none, blank, wrong), state
    takes_texts = (np.arange(len(codes)) >= first_of(codes == PLAIN_NUMBER)) | state.is_in_texts
    number = is_number | ((codes == PLAIN_NUMBER) & takes_texts) | ((codes == PADDED) & takes_texts)
    missing = blank & takes_texts
    wrong = (codes != NO_VALUE) & ~(number | missing)
    return AsRead(number, none, none, missing, wrong), state._replace(is_in_texts=bool(takes_texts[-1:].any()))


def as_known(state: FieldState, values: FieldValues, *, has_column: bool, in_texts: bool) -> AsRead:
    """Return how the values are read by a model that has learned, and by all consumers of its versions."""
    if state.kind == "label":
        return _decided(state, values)[0]
    codes, is_number, is_moment = values.codes, values.is_number, values.is_moment
    is_of_time = state.leading == "time"
    takes_texts = state.leading == "number" and state.is_in_texts
    is_known = has_column or is_of_time or in_texts or takes_texts
    text_number = (codes == PLAIN_NUMBER) | ((codes == PADDED) & (not in_texts))
    number = (is_number & has_column) | (text_number & (takes_texts and has_column))
    time = (codes >= DATE) & is_of_time
    time |= (is_number | text_number) & (is_of_time and not has_column and not in_texts)
    text = values.has_place & in_texts & ~(number | time)
    missing = (codes == BLANK) & (takes_texts or is_of_time) & ~text
    unseen = (is_number | text_number) & takes_texts  # Of a field of numbers, none of which was learned yet.
    wrong = ((codes != NO_VALUE) | is_number) & is_known & ~(number | unseen | time | text | missing)
    return AsRead(number, time, text, missing, wrong | (is_moment & is_known & ~time))


def first_of(rows: Sequence[bool] | Truths) -> int:
    """Return the first row; the number of rows if there is none."""
    found = np.asarray(rows)
    return int(np.argmax(found)) if found.any() else len(found)
