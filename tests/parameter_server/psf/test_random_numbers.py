"""Random psfs: their distributions, and the inputs that determine each number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parameter_server.psf.on_blocks import Fixture, OnBlocks

from streamiter.parameter_server import psf
from streamiter.parameter_server.psf.random import normals, uniforms

COLUMNS = range(200_000)


def test_normal_numbers_are_normal() -> None:
    """Normal numbers had wrong moments or tails, or neighbouring numbers were correlated."""
    numbers = normals(11, 0, COLUMNS)
    # Four standard errors: of the mean 1/√n, of the variance √(2/n), of the skewness √(6/n), of the kurtosis √(24/n).
    bound = 4.0 / np.sqrt(len(numbers))
    assert abs(numbers.mean()) < bound
    assert abs(numbers.var() - 1.0) < bound * np.sqrt(2.0)
    assert abs((numbers**3).mean()) < bound * np.sqrt(15.0)
    assert abs((numbers**4).mean() - 3.0) < bound * np.sqrt(96.0)
    assert abs((numbers[1:] * numbers[:-1]).mean()) < bound
    assert 4.0 < np.abs(numbers).max() < 6.5


def test_uniform_numbers_are_uniform() -> None:
    """Uniform numbers fell into some of 100 equal ranges more often than into others."""
    numbers = uniforms(11, 0, COLUMNS)
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < 170  # χ² of 99: mean 99, exceeds 170 once in 10⁵ seeds
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0


@pytest.mark.parametrize("draw", [normals, uniforms])
def test_a_number_depends_on_seed_row_and_column_only(draw: object) -> None:
    """Each shard drew from where the last block had ended, so a matrix had other values on 2 shards than on 1."""
    assert callable(draw)
    row = draw(3, 1, range(0, 101))
    for start in (1, 2, 3, 4, 5, 50):
        assert draw(3, 1, range(start, 101)).tobytes() == row[start:].tobytes()
    assert abs(np.corrcoef(row, draw(3, 2, range(0, 101)))[0, 1]) < 0.4
    assert abs(np.corrcoef(row, draw(4, 1, range(0, 101)))[0, 1]) < 0.4
    assert len(np.unique(row)) == len(row)


@pytest.mark.parametrize("draw", [normals, uniforms])
@pytest.mark.parametrize(("seed", "row"), [(0, 0), (2**64 - 1, 2**40)])
def test_columns_in_any_order_have_the_numbers_of_their_range(draw: Any, seed: int, row: int) -> None:
    """A feature had another initial value in training, where it came alone, than in a row that was drawn at once."""
    for first in (0, 2**31 - 5, 2**32 - 4, 9 * 10**9, 2**60):
        columns = np.random.default_rng(1).integers(first, first + 50, 200)
        expected = draw(seed, row, range(first, first + 50))[columns - first]
        assert draw(seed, row, columns).tobytes() == expected.tobytes()
    assert not len(draw(seed, row, np.empty(0, np.int64)))


def test_rows_drawn_one_by_one_equal_the_rows_of_the_whole_matrix() -> None:
    """The functions for one row and for all rows drew from different streams."""
    for one, all_rows in (
        (psf.RandomNormal("w", 6, 0.0, 1.0, seed=2), psf.RandomNormal("w", None, 0.0, 1.0, seed=2)),
        (psf.KaimingNormal("w", 1.0, 9, seed=2, row=6), psf.KaimingNormal("w", 1.0, 9, seed=2)),
    ):
        drivers = [OnBlocks(Fixture("dense", "float64"), (5, 50)) for _ in range(2)]
        drivers[0].update(one)
        drivers[1].update(all_rows)
        assert drivers[0].values()[6].tobytes() == drivers[1].values()[6].tobytes()
        assert len({row.tobytes() for row in drivers[1].values()}) == 10


def test_a_long_row_is_drawn_in_pieces_of_one_sequence() -> None:
    """Each piece of a long row restarted the sequence of random numbers."""
    from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
    from streamiter.parameter_server.storage import make_block

    matrix = Matrix("w", rows=1, columns=150_001, block=(1, 150_001))
    block = make_block(matrix, MatrixPartitioning(matrix, shards=1).blocks[0])
    psf.RandomNormal("w", 0, 0.0, 1.0, seed=2).partition_update(block, None)
    assert block.get(0, None).tobytes() == normals(2, 0, range(150_001)).tobytes()
