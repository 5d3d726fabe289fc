"""What the formats of labelled sparse vectors have in common."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

from streamiter.errors import ConfigurationError
from streamiter.records import Batch
from streamiter.topics.formats.failures import NO_VALUE, decode_each, encode_each
from streamiter.topics.topic import OutgoingBatch, TopicBatch
from streamiter_files.line_tokens import Irregular
from streamiter_files.number_parsing import NotANumber
from streamiter_files.sparse_lines import SparseLines, SparseRow, sorted_row

__all__ = ["SparseFormat", "number_text"]


class SparseFormat(abc.ABC):
    """Decodes a whole batch with numpy, and line by line where something about it is out of the ordinary."""

    def __init__(self, width: int | None, *, dense: bool) -> None:
        name = type(self).__name__
        if width is not None and width < 1:
            raise ConfigurationError(f"{name}: expected width >= 1, given {width}")
        if dense and width is None:
            raise ConfigurationError(f"{name}: dense=True needs width=, the number of features")
        self._width = width
        self._dense_width = width if dense else None

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises ``DecodeError`` naming every line that is wrong."""
        lines = self._decoded(batch.values)
        return lines.records() if self._dense_width is None else lines.dense(self._dense_width)

    def _decoded(self, values: Sequence[bytes | None]) -> SparseLines:
        present = [value for value in values if value is not None]
        if len(present) == len(values):
            try:
                lines = self._all_lines(present)
                lines.check(self._width)
                return lines
            except (Irregular, NotANumber):
                pass
        return SparseLines.from_rows(decode_each(values, self._checked_line))

    def _checked_line(self, line: bytes | None) -> SparseRow:
        if line is None:
            raise ValueError(NO_VALUE)
        return sorted_row(self._one_line(line), self._width)

    @abc.abstractmethod
    def _all_lines(self, lines: list[bytes]) -> SparseLines:
        """All lines, or ``Irregular`` or ``NotANumber`` if any is not quite regular."""

    @abc.abstractmethod
    def _one_line(self, line: bytes) -> SparseRow:
        """One line; raises ``ValueError`` with the reason."""

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Takes what ``decode`` gives without ``dense``; raises ``EncodeError`` for other records."""
        return OutgoingBatch(encode_each(batch, self._line))

    def _line(self, record: Any) -> bytes:
        if not isinstance(record, dict) or not {"label", "indices", "values"} <= record.keys():
            raise TypeError(f"expected a dict with label, indices and values, given {str(record)[:80]}")
        entries = zip(record["indices"], record["values"], strict=True)
        tokens = [number_text(record["label"])]
        tokens += [self._entry(int(index), float(value)) for index, value in entries]
        return " ".join(tokens).encode()

    @abc.abstractmethod
    def _entry(self, index: int, value: float) -> str:
        """One entry of a line; raises ``ValueError`` where the format has no form for it."""


def number_text(number: float) -> str:
    """The shortest text that reads as the same number.

    >>> number_text(1.0), number_text(0.1)
    ('1', '0.1')
    """
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, given {number}")
    return repr(float(number)).removesuffix(".0")
