"""What all functions that run where the parameters are have in common, and how to write one.

A function that changes parameters derives from :class:`UpdateFunction`. It is a frozen dataclass whose first setting is
the name of the matrix; it says which rows it needs, and changes one block at a time. ``get`` and ``put`` work on blocks
of dense and of sparse matrices alike:

>>> import asyncio
>>> from dataclasses import dataclass
>>> import numpy as np
>>> from streamiter.parameter_server import ParameterServer
>>> @dataclass(frozen=True)
... class Clip(UpdateFunction):
...     matrix: str
...     row: int
...     limit: float
...
...     def rows(self, matrix):
...         return (self.row,)
...
...     def partition_update(self, block, part):
...         block.put(self.row, None, block.get(self.row, None).clip(-self.limit, self.limit))

One that computes something derives from :class:`GetFunction`: each block contributes plain data (numbers, strings,
arrays, tuples and lists of them), and ``merge`` makes the result of it, on the caller's side:

>>> @dataclass(frozen=True)
... class Mean(GetFunction):
...     matrix: str
...     row: int
...
...     def rows(self, matrix):
...         return (self.row,)
...
...     def partition_get(self, block, part):
...         values = block.get(self.row, None)
...         return values.sum().item(), len(values)
...
...     def merge(self, parts):
...         return sum(total for total, _ in parts) / sum(count for _, count in parts)

>>> async def use():
...     async with ParameterServer(shards=2) as server:
...         await server.create_matrix("w", rows=1, columns=4, init=[[-9.0, 1.0, 2.0, 9.0]])
...         client = server.client(worker=0)
...         await client.update(Clip("w", row=0, limit=3.0))
...         print(await client.get("w", row=0), await client.aggregate(Mean("w", row=0)))
>>> asyncio.run(use())
[-3.  1.  2.  3.] 0.75

``split`` may be overridden to run on some blocks only, or to send each block its part of an array (``part`` above); its
numbers should not depend on how the matrix is cut. Where shards are in other processes, the class must be at the top
level of a module that they can import.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from streamiter.errors import ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.psf.importing import importable_name
from streamiter.parameter_server.storage.block import Block

__all__ = ["GetFunction", "PartitionFunction", "UpdateFunction", "check_function"]


class PartitionFunction(abc.ABC):
    """A function on a matrix that is split by block (``split``) and runs where each block lies.

    Derived classes are frozen dataclasses of plain settings, so that they are compared, printed and sent.
    """

    matrix: str

    @property
    def name(self) -> str:
        """For errors and statistics."""
        return type(self).__name__

    def rows(self, matrix: Matrix) -> Sequence[int]:
        """The rows it reads or changes: they must be there, and lie in one row block. Empty: none in particular."""
        return ()

    def check(self, matrix: Matrix) -> None:
        """Raise a ParameterServerError for what does not fit the matrix, before any block is touched."""
        del matrix

    def require_importable(self) -> PartitionFunction:
        """The same, fit for another process; raises ConfigurationError if that cannot import what it is made of."""
        importable_name(type(self), f"psf.{self.name}", "its class")
        return self

    def without_arrays(self) -> PartitionFunction:
        """What is sent with the parts that ``split`` has given, for these and not for another ``split``."""
        return self

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        """The blocks it runs on, each with what it needs there.

        All blocks of its rows' row block, or of the matrix where it names no rows, unless overridden.
        """
        rows = self.rows(matrix)
        blocks = partitioning.blocks_of_row(rows[0]) if rows else partitioning.blocks
        return [(block, None) for block in blocks]


class UpdateFunction(PartitionFunction):
    """A psf that changes parameters: ``rows`` and ``partition_update``, as the example at the top of this module."""

    checks_blocks: ClassVar[bool] = False
    """Whether ``partition_check`` has something to say: it is then asked of all blocks before any is changed."""

    checks_when_run: ClassVar[bool] = False
    """Whether ``partition_update`` asks it by itself: enough beside an add, which then takes one message, not two."""

    def partition_check(self, block: Block, part: Any) -> Any:
        """Raise a ParameterServerError if this block cannot be updated; changes nothing.

        What it returns is plain data for ``check_together``.
        """

    def check_together(self, checks: Sequence[Any]) -> None:
        """Raise a ParameterServerError if the blocks do not fit together; ``checks`` is what each has said."""

    def changed_rows(self, matrix: Matrix, block: Block) -> Sequence[int]:
        """Rows of a block that it may have changed, for subscribers: all that it touches, unless overridden."""
        return self.rows(matrix) or block.rows

    @abc.abstractmethod
    def partition_update(self, block: Block, part: Any) -> None:
        """Change one block; ``part`` is what ``split`` has given for it."""


class GetFunction(PartitionFunction):
    """A psf that computes something from parameters, an aggregate: ``rows``, ``partition_get`` and ``merge``."""

    @abc.abstractmethod
    def partition_get(self, block: Block, part: Any) -> Any:
        """What one block contributes: plain data."""

    @abc.abstractmethod
    def merge(self, parts: Sequence[Any]) -> Any:
        """The result, from what the blocks gave, in their order."""


def check_function(function: PartitionFunction, matrix: Matrix, partitioning: Partitioning) -> None:
    """Raise what is wrong with a function on a matrix, before any block is touched."""
    if function.matrix != matrix.name:
        raise ParameterServerError(
            f"{function.name}: expected matrix {matrix.name!r}, given {function.matrix!r}; name that one"
        )
    rows = function.rows(matrix)
    for row in rows:
        partitioning.checked_row(row)
    partitioning.check_same_row_block(rows, function.name)
    function.check(matrix)
