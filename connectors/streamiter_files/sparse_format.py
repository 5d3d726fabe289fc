"""Labelled sparse vectors as lines: the formats `Libsvm` and `Dummy`.

A batch of lines is decoded at once: `LineTokens` finds the numbers of all lines with numpy, and `SparseLines` holds the
vectors. A batch with an unusual line is decoded line by line.
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
from streamiter.topics.formats import decode_values, encode_each
from streamiter.topics.topic import OutgoingBatch, TopicBatch
from streamiter.values.numbers import Floats, Integers, whole_number
from streamiter.values.records import Batch, Columns

Flags = npt.NDArray[np.bool_]

# Every whole number of 18 digits fits into 64 bits.
_INTEGER_DIGITS: Final = 18

# With these characters only, ``float`` reads what _FLOAT describes: no nan, and no underscore.
_NUMBER_CHARACTERS: Final = b"0123456789+-.eE"

_FLOAT: Final = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def integer_of(token: bytes) -> int:
    """Return one whole number without sign; raise ``ValueError`` for another token."""
    if not (token.isdigit() and len(token) <= _INTEGER_DIGITS):
        raise ValueError(f"expected a whole number, given {token[:40]!r}")
    return int(token)


def float_of(token: bytes) -> float:
    """Return one finite number; raise ``ValueError`` for another token."""
    if not _FLOAT.fullmatch(token) or not np.isfinite(number := float(token)):
        raise ValueError(f"expected a finite number, given {token[:40]!r}")
    return number


class IrregularLines(ValueError):
    """A batch has a line that the fast decoding does not take; each line is decoded alone."""


class LineTokens:
    r"""The tokens of all lines of a batch: the texts between separators.

    Token i is ``block[starts[i]:ends[i]]``. The tokens of line j are those from ``firsts[j]`` to before ``firsts[j +
    1]``.

    >>> tokens = LineTokens([b"1 2:3", b"-4.5"], b" :")
    >>> tokens.firsts.tolist(), tokens.places.tolist(), tokens.floats(tokens.firsts[:-1]).tolist()
    ([0, 3, 4], [0, 1, 2, 0], [1.0, -4.5])
    """

    def __init__(self, lines: Sequence[bytes], separators: bytes) -> None:
        # Separators are around all lines, and one more for the look-ahead.
        self.block = b"\n".join([b"", *lines, b"\n"])
        if self.block.count(b"\n") != len(lines) + 2:
            raise IrregularLines("a line feed within a line")
        if self.block.translate(None, _NUMBER_CHARACTERS + separators + b"\n"):
            raise IrregularLines("a character that is in no number")
        self.text = np.frombuffer(self.block, dtype=np.uint8)
        self.digits = self.text - np.uint8(ord("0"))
        """For each digit its value; for every other character a number above 9, as the difference wraps around."""
        self.is_separator = _any_of(self.text, separators + b"\n")
        edges = np.flatnonzero(self.is_separator[1:] != self.is_separator[:-1]) + 1
        self.starts: Integers = edges[0::2]
        self.ends: Integers = edges[1::2]
        self.is_integer: Flags = self.ends - self.starts <= _INTEGER_DIGITS
        others = np.flatnonzero((self.digits > 9) & ~self.is_separator)
        self.is_integer[np.searchsorted(self.starts, others, side="right") - 1] = False
        lengths = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
        self.firsts: Integers = np.searchsorted(self.starts, np.cumsum(np.append(0, lengths + 1)))
        self.places: Integers = np.arange(len(self.starts)) - np.repeat(self.firsts[:-1], self.counts)
        """The place of each token in its line, from 0."""

    @property
    def counts(self) -> Integers:
        return np.diff(self.firsts)

    def integers(self, tokens: Integers) -> Integers:
        """Return the whole numbers of some tokens, by number; raise ``IrregularLines`` if one is no whole number."""
        if not self.is_integer[tokens].all():
            raise IrregularLines("not a whole number")
        starts, lengths = self.starts[tokens], (self.ends - self.starts)[tokens]
        numbers = np.zeros(len(tokens), dtype=np.int64)
        for length in np.flatnonzero(np.bincount(lengths)):
            which = np.flatnonzero(lengths == length)
            places = starts[which]
            of_length = np.zeros(len(which), dtype=np.int64)
            for place in range(length):
                of_length = of_length * 10 + self.digits[places + place]
            numbers[which] = of_length
        return numbers

    def floats(self, tokens: Integers) -> Floats:
        """Return the finite numbers of some tokens, by number; raise ``IrregularLines`` if one is no finite number."""
        are_integers = self.is_integer[tokens]
        numbers = np.empty(len(tokens))
        numbers[are_integers] = self.integers(tokens[are_integers])
        others = tokens[~are_integers]
        spans = zip(self.starts[others].tolist(), self.ends[others].tolist(), strict=True)
        try:
            numbers[~are_integers] = [float(self.block[start:end]) for start, end in spans]
        except ValueError:
            raise IrregularLines("not a number") from None
        if not np.isfinite(numbers).all():
            raise IrregularLines("not a finite number")
        return numbers


def _any_of(text: npt.NDArray[np.uint8], characters: bytes) -> Flags:
    found: Flags = text == characters[0]
    for character in characters[1:]:
        found |= text == character
    return found


ParsedRow = tuple[float, list[int], list[float]]
"""Label, indices (from 0, increasing) and values of one line."""


class SparseLines:
    """Labelled sparse vectors, one for each line, in common arrays.

    Line i has the label ``labels[i]``, and the entries from ``firsts[i]`` to before ``firsts[i + 1]``.
    """

    __slots__ = ("firsts", "indices", "labels", "values")

    def __init__(self, labels: Floats, firsts: Integers, indices: Integers, values: Floats) -> None:
        self.labels = labels
        self.firsts = firsts
        self.indices = indices
        self.values = values

    @classmethod
    def from_rows(cls, rows: Sequence[ParsedRow]) -> SparseLines:
        """Return the vectors of single rows."""
        counts = [len(indices) for _, indices, _ in rows]
        return cls(
            np.array([label for label, _, _ in rows], dtype=np.float64),
            np.cumsum([0, *counts]),
            np.array([index for _, indices, _ in rows for index in indices], dtype=np.int64),
            np.array([value for _, _, values in rows for value in values], dtype=np.float64),
        )

    def check(self, width: int | None) -> None:
        """Raise ``IrregularLines`` unless the indices of each line increase, from 0 to below ``width``."""
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


def sorted_row(row: ParsedRow, width: int | None) -> ParsedRow:
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
        if width is not None:
            whole_number(f"{name}(width=)", width, 1)
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
            except IrregularLines:
                pass
        return SparseLines.from_rows(decode_values(values, self._checked_line))

    def _checked_line(self, line: bytes) -> ParsedRow:
        return sorted_row(self._one_line(line), self._width)

    @abc.abstractmethod
    def _all_lines(self, lines: list[bytes]) -> SparseLines:
        """Return all lines; raise ``IrregularLines`` for an unusual line."""

    @abc.abstractmethod
    def _one_line(self, line: bytes) -> ParsedRow:
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
        indices = np.flatnonzero(tokens.places & 1)
        return SparseLines(
            tokens.floats(tokens.firsts[:-1]),
            np.cumsum(np.append(0, tokens.counts // 2)),
            tokens.integers(indices) - self._first_index,
            tokens.floats(indices + 1),
        )

    def _one_line(self, line: bytes) -> ParsedRow:
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
    """Raise ``IrregularLines`` unless each line is a label and pairs, with only a colon between index and value."""
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
        indices = tokens.integers(np.flatnonzero(tokens.places))
        return SparseLines(
            tokens.floats(tokens.firsts[:-1]),
            np.cumsum(np.append(0, tokens.counts - 1)),
            indices,
            np.ones(len(indices)),
        )

    def _one_line(self, line: bytes) -> ParsedRow:
        label, *indices = line.replace(b",", b" ").split() or [b""]
        return float_of(label), [integer_of(index) for index in indices], [1.0] * len(indices)

    def _entry(self, index: int, value: float) -> str:
        if value != 1:
            raise ValueError(f"expected 1 as the value of every feature, given {value}; see Libsvm")
        return str(index)

    def __repr__(self) -> str:
        return f"Dummy(width={self._width})"
