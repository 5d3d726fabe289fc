"""Lines of a label and a number for each feature."""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt

from streamiter.errors import DecodeError
from streamiter.records import Batch, Columns
from streamiter.topics.topic import TopicBatch

__all__ = ["DenseLines"]


@final
class DenseLines:
    """Lines ``label number number …``, separated by white space or commas.

    Gives `Columns`: ``label`` (records,) and ``features`` (records, numbers of the first line).

    >>> DenseLines().decode(TopicBatch(values=[b"1 0.5 2", b"-1,3,4"]))["features"].tolist()
    [[0.5, 2.0], [3.0, 4.0]]
    >>> DenseLines().decode(TopicBatch(values=[b"1 0.5 2", b"-1 3"]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: expected a label and 2 numbers, given 1 number
    """

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises ``DecodeError`` naming every line that is wrong."""
        failures: dict[int, str] = {}
        rows: list[npt.NDArray[np.float64]] = []
        for index, line in enumerate(batch.values):
            try:
                numbers = _numbers(line or b"")
            except ValueError as error:
                failures[index] = f"expected a label and numbers, given {error}"
                continue
            if len(numbers) < 2 or (rows and len(numbers) != len(rows[0])):
                wanted = f"{len(rows[0]) - 1} numbers" if rows else "numbers"
                count = max(len(numbers) - 1, 0)
                failures[index] = f"expected a label and {wanted}, given {count} number{'s' * (count != 1)}"
            elif not np.isfinite(numbers).all():
                failures[index] = "expected finite numbers"
            else:
                rows.append(numbers)
        if failures:
            raise DecodeError(failures)
        table = np.stack(rows)
        return Columns({"label": table[:, 0].copy(), "features": table[:, 1:].copy()})

    def __repr__(self) -> str:
        return "DenseLines()"


def _numbers(line: bytes) -> npt.NDArray[np.float64]:
    if b"_" in line or b"\0" in line:  # numpy takes 1_0 for 10, and leaves out NULs at an end
        raise ValueError(repr(line[:80]))
    return np.array(line.replace(b",", b" ").split()).astype(np.float64)
