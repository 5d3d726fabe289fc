"""A matrix in blocks without a server, on which psfs run as they do on clients and shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamiter.parameter_server.matrix import DType, Matrix, MatrixPartitioning
from streamiter.parameter_server.psf import GetFunction, UpdateFunction
from streamiter.parameter_server.psf.function import check_function
from streamiter.parameter_server.storage import make_block
from streamiter.parameter_server.storage.block import BlockRow

ROWS, COLUMNS = 10, 100

SHAPES: dict[str, tuple[int, int]] = {"whole": (10, 100), "5 × 50": (5, 50), "uneven": (7, 33), "one column": (10, 1)}


@dataclass(frozen=True)
class Fixture:
    """The initial values of the matrix. In all shapes, rows 0 to 4 are in one row block; results go to row 3."""

    name: str
    dtype: DType
    default: float | None = None
    """The default of a sparse matrix, or None for a dense one."""
    density: float = 1.0
    special: bool = False

    def values(self) -> np.ndarray[Any, Any]:
        """Return the values: row 0 ~ U(0, 1), row 1 ~ N(0, 1), row 2 = 1, all other rows ~ N(0, 9)."""
        random = np.random.default_rng(5)
        values = random.normal(size=(ROWS, COLUMNS)) * 3.0
        values[0] = random.uniform(size=COLUMNS)
        values[1] = random.normal(size=COLUMNS)
        values[2] = 1.0
        if self.dtype == "int64":
            values = np.round(values * 7.0)
            values[2] = 1.0
        if self.special:
            values[0, ::9] = [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -0.5, -1.5, 1e30, -1e-30]
            values[1, ::7] = [0.0, np.inf, -0.0, np.nan, -np.inf, 1.0, 0.0, -2.5, 1e30, 0.0, 3.0, -1.0, 0.5, 2, 7]
        if self.default is not None:
            absent = random.uniform(size=values.shape) >= self.density
            values[absent] = self.default
        return values.astype(self.dtype)


def fixtures(dtype: DType) -> Iterator[Fixture]:
    """Yield dense fixtures, and sparse ones of several densities with both kinds of default."""
    yield Fixture("dense", dtype)
    if dtype != "int64":
        yield Fixture("dense with NaN, infinities and zeros", dtype, special=True)
    other = 2.0 if dtype == "int64" else 2.5
    for default, density in ((0.0, 0.1), (0.0, 1.0), (other, 0.0), (other, 0.3)):
        yield Fixture(f"sparse, {density:.0%} beside {default}", dtype, default, density)
    if dtype != "int64":
        yield Fixture("sparse with NaN, infinities and zeros", dtype, 0.0, 0.5, special=True)


class InBlocks:
    """The blocks of one matrix."""

    def __init__(self, matrix: Matrix, shards: int = 1) -> None:
        self.matrix = matrix
        self.partitioning = MatrixPartitioning(matrix, shards)
        self.blocks = [make_block(matrix, block) for block in self.partitioning.blocks]

    def values(self) -> np.ndarray[Any, Any]:
        """Return the whole matrix as a dense array."""
        values = np.empty((self.matrix.rows, self.matrix.columns), self.matrix.numpy_dtype)
        for block in self.blocks:
            for row in block.rows:
                values[row, block.columns.start : block.columns.stop] = block.get(row, None)
        return values

    def update(self, function: UpdateFunction) -> None:
        """Update the blocks as client and shards do: check, split, ask all blocks, then change them."""
        check_function(function, self.matrix, self.partitioning)
        parts = [(self.blocks[block.number], part) for block, part in function.split(self.matrix, self.partitioning)]
        if function.checks_blocks:
            function.check_together([function.partition_check(block, part) for block, part in parts])
        for block, part in parts:
            function.partition_update(block, part)

    def aggregate(self, function: GetFunction) -> Any:
        """Return the merged results of the blocks."""
        check_function(function, self.matrix, self.partitioning)
        parts = function.split(self.matrix, self.partitioning)
        return function.merge([function.partition_get(self.blocks[block.number], part) for block, part in parts])


class OnBlocks(InBlocks):
    """The blocks of a matrix with the initial values of a fixture, all of one shape."""

    def __init__(self, fixture: Fixture, shape: tuple[int, int] | None) -> None:
        self.fixture = fixture
        settings: dict[str, Any] = {"sparse": fixture.default is not None, "default": fixture.default or 0.0}
        super().__init__(Matrix("w", ROWS, COLUMNS, fixture.dtype, block=shape, **settings))
        self.initial = fixture.values()
        self.reset(range(ROWS))

    def reset(self, rows: Any) -> None:
        """Restore the initial values and the default of these rows."""
        nothing = BlockRow(np.empty(0, np.int64), np.empty(0, self.fixture.dtype), self.fixture.default or 0.0)
        for block in self.blocks:
            for row in block.rows:
                if row in rows:
                    if block.is_sparse:
                        block.replace_row(row, nothing)
                    block.put(
                        row, None, np.ascontiguousarray(self.initial[row, block.columns.start : block.columns.stop])
                    )
