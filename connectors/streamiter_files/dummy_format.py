"""The dummy format: a label and the indices of the features that are 1."""

from __future__ import annotations

from typing import final

import numpy as np

from streamiter_files.line_tokens import Irregular, LineTokens
from streamiter_files.number_parsing import float_of, integer_of, parse_floats, parse_integers
from streamiter_files.sparse_format import SparseFormat
from streamiter_files.sparse_lines import SparseLines, SparseRow

__all__ = ["Dummy"]


@final
class Dummy(SparseFormat):
    """Lines ``label index index ...`` with indices from 0, separated by white space or commas, both ways.

    Records as for `Libsvm`, all values being 1; so are ``width`` and ``dense``. Indices may come in any order
    but only once.

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
            raise Irregular("a line without label")
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
