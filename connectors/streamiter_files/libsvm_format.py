"""LIBSVM's format: ``label index:value index:value``."""

from __future__ import annotations

import re
from typing import Final, final

import numpy as np

from streamiter_files.line_tokens import Irregular, LineTokens
from streamiter_files.number_parsing import float_of, integer_of, parse_floats, parse_integers
from streamiter_files.sparse_format import SparseFormat, number_text
from streamiter_files.sparse_lines import SparseLines, SparseRow

__all__ = ["Libsvm"]

_QUERY: Final = re.compile(rb"(?<=[ \t])qid:\S*")
_COLON: Final = ord(":")


@final
class Libsvm(SparseFormat):
    """Lines ``label index:value ...``, both ways.

    A record is a dict: ``label`` (float), ``indices`` (int64, from 0, increasing), ``values`` (float64). In
    the file indices count from 1, or from 0 with ``zero_based``; they may come in any order but only once.
    ``width`` is the number of features: an index beyond it is refused. With ``dense`` the result is
    `Columns`: ``label`` (records,) and ``features`` (records, width). Comments (from ``#``) and ``qid:`` are
    left out. Numbers must be finite.

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
    """Each line must be a label and pairs, a colon (and only it) between index and value."""
    before_colon = tokens.text[tokens.ends] == _COLON
    if not (
        (tokens.counts % 2 == 1).all()
        and np.array_equal(before_colon, tokens.places & 1)
        and np.count_nonzero(tokens.text == _COLON) == np.count_nonzero(before_colon)
        and not tokens.is_separator[tokens.ends[before_colon] + 1].any()
    ):
        raise Irregular("not label index:value ...")
