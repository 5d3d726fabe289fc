"""Examples that are kept and gone through again and again, a mini-batch at a time.

>>> import numpy as np
>>> blocks = ExampleBlocks()
>>> for start in (0.0, 2.0, 4.0):
...     blocks.add(CheckedExamples(np.ones((2, 1)), np.array([start, start + 1])))
>>> turns = MiniBatches(4)
>>> for _ in range(3):
...     print([part.targets.tolist() for part in blocks.between(*turns.now())])
...     turns.next(len(blocks))
[[0.0, 1.0, 2.0, 3.0]]
[[4.0, 5.0]]
[[0.0, 1.0, 2.0, 3.0]]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from streamiter.learn.rows.examples import CheckedExamples

__all__ = ["ExampleBlocks", "MiniBatches"]

# Large enough that a numpy call is not noticed beside its work, and that BLAS uses all cores; while rows are put
# together, no more than this many are in memory twice.
_BLOCK_ROWS: Final = 65_536


class ExampleBlocks:
    """Examples in the order they were added, in blocks.

    Small pieces become blocks of equal length, so that sums over them are the same to the last bit however the
    examples were cut; a piece that is longer stays as it is.
    """

    def __init__(self) -> None:
        self._blocks: list[CheckedExamples] = []
        self._rows_in_blocks = 0
        self._parts: list[CheckedExamples] = []
        """What does not fill a block yet."""
        self._rows_in_parts = 0

    def __len__(self) -> int:
        return self._rows_in_blocks + self._rows_in_parts

    def add(self, examples: CheckedExamples) -> None:
        """Put examples behind the others; they must not change afterwards."""
        if not self._parts and len(examples) >= _BLOCK_ROWS:
            self._add_block(examples)
            return
        while len(examples):
            part = examples[: _BLOCK_ROWS - self._rows_in_parts]
            examples = examples[len(part) :]
            self._parts.append(part)
            self._rows_in_parts += len(part)
            if self._rows_in_parts == _BLOCK_ROWS:
                parts, self._parts, self._rows_in_parts = self._parts, [], 0
                self._add_block(CheckedExamples.concatenate(parts))

    def _add_block(self, block: CheckedExamples) -> None:
        self._blocks.append(block)
        self._rows_in_blocks += len(block)

    def between(self, start: int, stop: int) -> Iterator[CheckedExamples]:
        """Rows ``start`` to ``stop`` (half-open; beyond the last is the last), block by block, without copies."""
        if len(self._parts) > 1:
            self._parts = [CheckedExamples.concatenate(self._parts)]
        first = 0
        for block in (*self._blocks, *self._parts):
            if start < first + len(block) and stop > first:
                whole = start <= first and stop >= first + len(block)
                yield block if whole else block[max(start - first, 0) : stop - first]
            first += len(block)

    def to_records(self) -> list[dict[str, Any]]:
        """All of it as plain data."""
        return [part.to_record() for part in (*self._blocks, *self._parts)]

    @classmethod
    def from_records(cls, records: list[dict[str, Any]]) -> ExampleBlocks:
        """What :meth:`to_records` gave."""
        blocks = cls()
        for record in records:
            blocks.add(CheckedExamples.from_record(record))
        return blocks


class MiniBatches:
    """Which rows come next: ``length`` of them, fewer at the end, and then from the beginning. None: all."""

    def __init__(self, length: int | None) -> None:
        self._length = sys.maxsize if length is None else length
        self.start = 0

    def now(self) -> tuple[int, int]:
        """The first row, and the one behind the last."""
        return self.start, self.start + self._length

    def next(self, rows: int) -> None:
        """Go on to the next of ``rows`` rows in all."""
        self.start += self._length
        if self.start >= rows:
            self.start = 0
