"""Labelled sparse vectors as lines: the formats `Libsvm` and `Dummy`.

A batch of lines is decoded at once with numpy. `LineTokens` finds the tokens of all lines, `parse_integers` and
`parse_floats` convert them with the results of ``int`` and ``float``, and `SparseLines` holds the vectors. A batch
with an unusual line is decoded line by line.

>>> text = np.frombuffer(b"12 -0.5 1e-3 x", dtype=np.uint8)
>>> parse_floats(text, np.array([0, 3, 8]), np.array([2, 7, 12])).tolist()
[12.0, -0.5, 0.001]
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.records import Batch, Columns
from streamiter.topics.formats import decode_values, encode_each
from streamiter.topics.topic import OutgoingBatch, TopicBatch

Text = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Every whole number of 18 digits fits into 64 bits.
_INTEGER_DIGITS: Final = 18

# A number of up to 15 digits and its power of ten (up to 10^22) are exact in a double, so one division gives the
# nearest double (Clinger, How to read floating point numbers accurately, 1990).
_EXACT_DIGITS: Final = 15
_DECIMAL_LENGTH: Final = _EXACT_DIGITS + len("-.")

_FLOAT: Final = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MINUS, _PLUS, _DOT, _ZERO = b"-+.0"


class NotANumber(ValueError):
    """A token is not a number of the expected kind."""


def integer_of(token: bytes) -> int:
    """Return one whole number without sign; raise ``NotANumber`` for another token."""
    if not (token.isdigit() and len(token) <= _INTEGER_DIGITS):
        raise NotANumber(f"expected a whole number, given {token[:40]!r}")
    return int(token)


def float_of(token: bytes) -> float:
    """Return one finite number; raise ``NotANumber`` for another token."""
    if not _FLOAT.fullmatch(token) or not np.isfinite(number := float(token)):
        raise NotANumber(f"expected a finite number, given {token[:40]!r}")
    return number


def parse_integers(text: Text, starts: Integers, ends: Integers) -> Integers:
    """Return the whole numbers between ``starts`` and ``ends``; raise ``NotANumber`` if a token is no whole number."""
    numbers, are_integers = _integers(text, starts, ends - starts)
    if not are_integers.all():
        raise NotANumber("expected whole numbers")
    return numbers


def parse_floats(text: Text, starts: Integers, ends: Integers) -> Numbers:
    """Return the finite numbers between ``starts`` and ``ends``; raise ``NotANumber`` for another token."""
    lengths = ends - starts
    integers, are_done = _integers(text, starts, np.where(lengths <= _EXACT_DIGITS, lengths, 0))
    numbers = integers.astype(np.float64)
    for parse in (_decimals, _any_floats):
        left = np.flatnonzero(~are_done)
        if left.size:
            numbers[left], are_done[left] = parse(text, starts[left], lengths[left])
    return numbers


def _integers(text: Text, starts: Integers, lengths: Integers) -> tuple[Integers, Flags]:
    numbers = np.zeros(len(starts), dtype=np.int64)
    are_integers = np.zeros(len(starts), dtype=np.bool_)
    counts = np.bincount(np.clip(lengths, 0, _INTEGER_DIGITS + 1), minlength=_INTEGER_DIGITS + 2)
    for length in np.flatnonzero(counts[1:-1]) + 1:
        which = np.flatnonzero(lengths == length) if counts[length] < len(starts) else slice(None)
        numbers[which], are_integers[which] = _integers_of_length(text, starts[which], int(length))
    return numbers, are_integers


def _integers_of_length(text: Text, starts: Integers, length: int) -> tuple[Integers, Flags]:
    numbers = np.zeros(len(starts), dtype=np.int64)
    are_integers = np.ones(len(starts), dtype=np.bool_)
    for place in range(length):
        digits = text[starts + place] - np.uint8(_ZERO)  # wraps around, so every other character is above 9
        are_integers &= digits < 10
        numbers = numbers * 10 + digits
    return numbers, are_integers


def _decimals(text: Text, starts: Integers, lengths: Integers) -> tuple[Numbers, Flags]:
    """Parse short decimals: digits with at most a sign and a point. The flags tell which tokens are such decimals."""
    mantissas = np.zeros(len(starts), dtype=np.int64)
    digits_seen, decimals = np.zeros_like(mantissas), np.zeros_like(mantissas)
    are_good = (lengths > 0) & (lengths <= _DECIMAL_LENGTH)
    behind_point = np.zeros(len(starts), dtype=np.bool_)
    negative = text[starts] == _MINUS
    signed = negative | (text[starts] == _PLUS)
    for place in range(min(_DECIMAL_LENGTH, int(lengths.max()))):
        inside = place < lengths
        characters = text[np.where(inside, starts + place, 0)]
        digits = characters - np.uint8(_ZERO)
        are_digits = inside & (digits < 10)
        are_points = inside & (characters == _DOT) & ~behind_point
        are_good &= ~inside | are_digits | are_points | (signed if place == 0 else False)
        mantissas = np.where(are_digits, mantissas * 10 + digits, mantissas)
        digits_seen += are_digits
        decimals += are_digits & behind_point
        behind_point |= are_points
    are_good &= (digits_seen >= 1) & (digits_seen <= _EXACT_DIGITS)
    magnitudes = mantissas / np.power(10.0, decimals)
    return np.where(negative, -magnitudes, magnitudes), are_good


def _any_floats(text: Text, starts: Integers, lengths: Integers) -> tuple[Numbers, Flags]:
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    numbers = [float_of(text[start : start + length].tobytes()) for start, length in spans]
    return np.array(numbers), np.ones(len(numbers), dtype=np.bool_)


class IrregularLines(ValueError):
    """A batch has a line that the fast decoding does not take; each line is decoded alone."""


class LineTokens:
    r"""The tokens of all lines of a batch: the texts between separators.

    Token i is ``text[starts[i]:ends[i]]``. The tokens of line j are those from ``firsts[j]`` to before ``firsts[j +
    1]``.

    >>> tokens = LineTokens([b"1 2:3", b"4"], b" :")
    >>> tokens.firsts.tolist(), bytes(tokens.text[tokens.ends]), tokens.places.tolist()
    ([0, 3, 4], b' :\n\n', [0, 1, 2, 0])
    """

    __slots__ = ("ends", "firsts", "is_separator", "places", "starts", "text")

    def __init__(self, lines: Sequence[bytes], separators: bytes) -> None:
        block = b"\n".join(
            [b"", *lines, b"\n"]
        )  # separators around all lines, and one more for the look-ahead
        if block.count(b"\n") != len(lines) + 2:
            raise IrregularLines("a line feed within a line")
        self.text: Text = np.frombuffer(block, dtype=np.uint8)
        self.is_separator = _any_of(self.text, separators + b"\n")
        edges = np.flatnonzero(self.is_separator[1:] != self.is_separator[:-1]) + 1
        self.starts: Integers = edges[0::2]
        self.ends: Integers = edges[1::2]
        lengths = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
        self.firsts: Integers = np.searchsorted(self.starts, np.cumsum(np.append(0, lengths + 1)))
        self.places: Integers = np.arange(len(self.starts)) - np.repeat(self.firsts[:-1], self.counts)
        """The place of each token in its line, from 0."""

    @property
    def counts(self) -> Integers:
        return np.diff(self.firsts)


def _any_of(text: Text, characters: bytes) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = text == characters[0]
    for character in characters[1:]:
        found |= text == character
    return found


SparseRow = tuple[float, list[int], list[float]]
"""Label, indices (from 0, increasing) and values of one line."""


class SparseLines:
    """Labelled sparse vectors, one for each line, in common arrays.

    Line i has the label ``labels[i]``, and the entries from ``firsts[i]`` to before ``firsts[i + 1]``.
    """

    __slots__ = ("firsts", "indices", "labels", "values")

    def __init__(self, labels: Numbers, firsts: Integers, indices: Integers, values: Numbers) -> None:
        self.labels = labels
        self.firsts = firsts
        self.indices = indices
        self.values = values

    @classmethod
    def from_rows(cls, rows: Sequence[SparseRow]) -> SparseLines:
        """Return the vectors of single rows."""
        counts = [len(indices) for _, indices, _ in rows]
        return cls(
            np.array([label for label, _, _ in rows], dtype=np.float64),
            np.cumsum([0, *counts]),
            np.array([index for _, indices, _ in rows for index in indices], dtype=np.int64),
            np.array([value for _, _, values in rows for value in values], dtype=np.float64),
        )

    def check(self, width: int | None) -> None:
        """Raise ``Irregular`` unless the indices of each line increase, from 0 to below ``width``."""
        increasing = self.indices[1:] > self.indices[:-1]
        inner = self.firsts[(self.firsts > 0) & (self.firsts < len(self.indices))]
        increasing[inner - 1] = True  # between two lines
        if not increasing.all():
            raise IrregularLines("indices that do not increase")
        if self.indices.size and (self.indices.min() < 0 or (width and self.indices.max() >= width)):
            raise IrregularLines("indices out of range")

    def records(self) -> list[dict[str, Any]]:
        """Return each line as a dict with ``label``, ``indices`` and ``values`` (views of the common arrays)."""
        firsts = self.firsts.tolist()
        indices, values = self.indices, self.values
        return [
            {"label": label, "indices": indices[first:last], "values": values[first:last]}
            for label, first, last in zip(self.labels.tolist(), firsts[:-1], firsts[1:], strict=True)
        ]

    def dense(self, width: int) -> Columns:
        """Return the columns ``label`` and ``features``, of the shape (lines, width)."""
        features = np.zeros((len(self.labels), width))
        lines = np.repeat(np.arange(len(self.labels)), np.diff(self.firsts))
        features[lines, self.indices] = self.values
        return Columns({"label": self.labels, "features": features})


def sorted_row(row: SparseRow, width: int | None) -> SparseRow:
    """Return the row with its indices in order; raise ``ValueError`` for an index that is repeated or too large."""
    label, indices, values = row
    entries = sorted(zip(indices, values, strict=True), key=lambda entry: entry[0])
    ordered = [index for index, _ in entries]
    for index, following in pairwise(ordered):
        if index == following:
            raise ValueError(f"the index {index} (counted from 0) comes twice")
    if width is not None and ordered and ordered[-1] >= width:
        raise ValueError(f"the index {ordered[-1]} (counted from 0) is not below the width {width}")
    return label, ordered, [value for _, value in entries]


class SparseFormat(abc.ABC):
    """Base class of the formats: decodes a whole batch with numpy, and an unusual batch line by line."""

    def __init__(self, width: int | None, *, dense: bool) -> None:
        name = type(self).__name__
        if width is not None and width < 1:
            raise ConfigurationError(f"{name}: expected width >= 1, given {width}")
        if dense and width is None:
            raise ConfigurationError(f"{name}: dense=True needs width=, the number of features")
        self._width = width
        self._dense_width = width if dense else None

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the records; raise ``DecodeError`` that names every wrong line."""
        lines = self._decoded(batch.values)
        return lines.records() if self._dense_width is None else lines.dense(self._dense_width)

    def _decoded(self, values: Sequence[bytes | None]) -> SparseLines:
        present = [value for value in values if value is not None]
        if len(present) == len(values):
            try:
                lines = self._all_lines(present)
                lines.check(self._width)
                return lines
            except (IrregularLines, NotANumber):
                pass
        return SparseLines.from_rows(decode_values(values, self._checked_line))

    def _checked_line(self, line: bytes) -> SparseRow:
        return sorted_row(self._one_line(line), self._width)

    @abc.abstractmethod
    def _all_lines(self, lines: list[bytes]) -> SparseLines:
        """Return all lines; raise ``Irregular`` or ``NotANumber`` for an unusual line."""

    @abc.abstractmethod
    def _one_line(self, line: bytes) -> SparseRow:
        """Return one line; raise ``ValueError`` with the reason."""

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the lines of records like those of ``decode`` without ``dense``; raise ``EncodeError`` for others."""
        return OutgoingBatch(encode_each(batch, self._line))

    def _line(self, record: object) -> bytes:
        if not isinstance(record, dict) or not {"label", "indices", "values"} <= record.keys():
            raise TypeError(f"expected a dict with label, indices and values, given {str(record)[:80]}")
        entries = zip(record["indices"], record["values"], strict=True)
        tokens = [number_text(record["label"])]
        tokens += [self._entry(int(index), float(value)) for index, value in entries]
        return " ".join(tokens).encode()

    @abc.abstractmethod
    def _entry(self, index: int, value: float) -> str:
        """Return one entry of a line; raise ``ValueError`` for a value that the format cannot hold."""


def number_text(number: float) -> str:
    """Return the shortest text that is read as the same number.

    >>> number_text(1.0), number_text(0.1)
    ('1', '0.1')
    """
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, given {number}")
    return repr(float(number)).removesuffix(".0")


_QUERY: Final = re.compile(rb"(?<=[ \t])qid:\S*")
_COLON: Final = ord(":")


@final
class Libsvm(SparseFormat):
    """Lines ``label index:value ...``, both ways.

    A record is a dict: ``label`` (float), ``indices`` (int64, from 0, increasing), ``values`` (float64). In the file,
    indices count from 1, or from 0 with ``zero_based``; they may be in any order, but each only once. ``width`` is the
    number of features; larger indices are refused. With ``dense`` the result is `Columns`: ``label`` (records,) and
    ``features`` (records, width). Comments (from ``#``) and ``qid:`` are left out. Numbers must be finite.

    Source: the README of LIBSVM (Chang and Lin), "data format"; qid is that of SVMrank.

    >>> from streamiter.topics.topic import TopicBatch
    >>> Libsvm().decode(TopicBatch(values=[b"-1 3:0.5 7:1"]))
    [{'label': -1.0, 'indices': array([2, 6]), 'values': array([0.5, 1. ])}]
    >>> Libsvm(width=3, dense=True).decode(TopicBatch(values=[b"+1 1:2", b"-1 # nothing"]))["features"]
    array([[2., 0., 0.],
           [0., 0., 0.]])
    >>> Libsvm().decode(TopicBatch(values=[b"1 2:3", b"1 2:x", b"1 0:1"]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: expected a finite number, given b'x' (and 1 more)
    """

    def __init__(self, width: int | None = None, *, zero_based: bool = False, dense: bool = False) -> None:
        super().__init__(width, dense=dense)
        self._first_index = 0 if zero_based else 1

    def _all_lines(self, lines: list[bytes]) -> SparseLines:
        tokens = LineTokens(_without_extras(lines), b" \t:")
        _check_colons(tokens)
        labels = tokens.firsts[:-1]
        indices = np.flatnonzero(tokens.places & 1)
        values = indices + 1
        return SparseLines(
            parse_floats(tokens.text, tokens.starts[labels], tokens.ends[labels]),
            np.cumsum(np.append(0, tokens.counts // 2)),
            parse_integers(tokens.text, tokens.starts[indices], tokens.ends[indices]) - self._first_index,
            parse_floats(tokens.text, tokens.starts[values], tokens.ends[values]),
        )

    def _one_line(self, line: bytes) -> SparseRow:
        [line] = _without_extras([line])
        label, *entries = line.split() or [b""]
        pairs = [self._pair(entry) for entry in entries]
        return float_of(label), [index for index, _ in pairs], [value for _, value in pairs]

    def _pair(self, entry: bytes) -> tuple[int, float]:
        index_text, colon, value = entry.partition(b":")
        if not colon:
            raise ValueError(f"expected index:value, given {entry[:40]!r}")
        index = integer_of(index_text)
        if index < self._first_index:
            raise ValueError("the index 0, where indices count from 1; see Libsvm(zero_based=True)")
        return index - self._first_index, float_of(value)

    def _entry(self, index: int, value: float) -> str:
        return f"{index + self._first_index}:{number_text(value)}"

    def __repr__(self) -> str:
        return f"Libsvm(width={self._width}, zero_based={not self._first_index})"


def _without_extras(lines: list[bytes]) -> list[bytes]:
    block = b"\n".join(lines)
    if b"#" in block:
        lines = [line.partition(b"#")[0] for line in lines]
    if b"qid:" in block:
        lines = [_QUERY.sub(b"", line) for line in lines]
    return lines


def _check_colons(tokens: LineTokens) -> None:
    """Raise ``Irregular`` unless each line is a label and pairs, with only a colon between index and value."""
    before_colon = tokens.text[tokens.ends] == _COLON
    if not (
        (tokens.counts % 2 == 1).all()
        and np.array_equal(before_colon, tokens.places & 1)
        and np.count_nonzero(tokens.text == _COLON) == np.count_nonzero(before_colon)
        and not tokens.is_separator[tokens.ends[before_colon] + 1].any()
    ):
        raise IrregularLines("not label index:value ...")


@final
class Dummy(SparseFormat):
    """Lines ``label index index ...`` with indices from 0, separated by white space or commas, both ways.

    Records, ``width`` and ``dense`` are those of `Libsvm`; all values are 1. Indices may be in any order, but each only
    once.

    Source: the data format "dummy" of Angel (github.com/Angel-ML/angel).

    >>> from streamiter.topics.topic import TopicBatch
    >>> Dummy().decode(TopicBatch(values=[b"-1 2 6", b"1,0"]))
    [{'label': -1.0, 'indices': array([2, 6]), 'values': array([1., 1.])}, \
{'label': 1.0, 'indices': array([0]), 'values': array([1.])}]
    """

    def __init__(self, width: int | None = None, *, dense: bool = False) -> None:
        super().__init__(width, dense=dense)

    def _all_lines(self, lines: list[bytes]) -> SparseLines:
        tokens = LineTokens(lines, b" \t,")
        if not tokens.counts.all():
            raise IrregularLines("a line without label")
        labels = tokens.firsts[:-1]
        features = np.flatnonzero(tokens.places)
        indices = parse_integers(tokens.text, tokens.starts[features], tokens.ends[features])
        return SparseLines(
            parse_floats(tokens.text, tokens.starts[labels], tokens.ends[labels]),
            np.cumsum(np.append(0, tokens.counts - 1)),
            indices,
            np.ones(len(indices)),
        )

    def _one_line(self, line: bytes) -> SparseRow:
        label, *indices = line.replace(b",", b" ").split() or [b""]
        return float_of(label), [integer_of(index) for index in indices], [1.0] * len(indices)

    def _entry(self, index: int, value: float) -> str:
        if value != 1:
            raise ValueError(f"expected 1 as the value of every feature, given {value}; see Libsvm")
        return str(index)

    def __repr__(self) -> str:
        return f"Dummy(width={self._width})"
