"""How psfs are written, compared and sent, random ones, and those that sparse rows refuse."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from parameter_server.psf import aggregate_cases, update_cases, user_functions
from parameter_server.psf.on_blocks import SHAPES, Fixture, OnBlocks

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError
from streamiter.parameter_server import psf
from streamiter.parameter_server.psf.random import normals, uniforms

if TYPE_CHECKING:
    from decimal import Decimal


def test_a_random_psf_needs_a_seed() -> None:
    """A run with random initial values could not be repeated."""
    with pytest.raises(TypeError, match="seed"):
        psf.RandomNormal("w", 0, 0.0, 1.0)  # type: ignore[call-arg]


ALL_CASES = (*update_cases.CASES, *aggregate_cases.CASES)


def test_psfs_are_compared_by_their_settings() -> None:
    """A matrix that was made again with the same on_clock was refused as another matrix."""
    for case in ALL_CASES:
        function = case.function
        settings = {name: _copied(value) for name, value in vars(function).items()}
        again = type(function)(**settings)
        assert again == function
        assert hash(again) == hash(function)
        assert function != "psf"
        assert repr(again) == repr(function)
    assert psf.Put("w", 0, [1, 2]) != psf.Put("w", 0, [1, 3])
    assert psf.Pull("w", 0) != psf.Pull("w", 0, [1])
    assert psf.Add("w", 0, 1, 2) != psf.Sub("w", 0, 1, 2)


@dataclass(frozen=True)
class _Shift(psf.UpdateFunction):
    matrix: str
    by: Any

    def partition_update(self, block: Any, part: Any) -> None:
        block.put(0, None, block.get(0, None) + self.by)


def test_psfs_with_the_same_nan_or_array_are_equal() -> None:
    """With Python 3.13 a psf with a NaN was not equal to itself, and one of a user with an array failed to compare."""
    for made in (
        partial(psf.Fill, "w", 0),
        partial(psf.FullFill, "w"),
        partial(psf.AddS, "w", 0, 1),
        partial(_Shift, "w"),
    ):
        assert made(float("nan")) == made(float("nan"))
        assert made(float("nan")) != made(1.0)
    assert _Shift("w", np.array([1.0, math.nan])) == _Shift("w", np.array([1.0, math.nan]))
    assert _Shift("w", np.array([1.0, 2.0])) != _Shift("w", np.array([1.0, math.nan]))
    assert len({_Shift("w", np.zeros(2)), _Shift("w", np.zeros(2))}) == 1


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def test_settings_are_plain_values_and_copies() -> None:
    """A numpy scalar could not be sent, and a change of the caller's array changed a function already under way."""
    values = np.ones(100)
    function = psf.Put("w", np.int64(1), values)  # type: ignore[arg-type]
    values.fill(5.0)
    assert type(function.row) is int
    assert np.asarray(function.values).tolist() == [1.0] * 100
    assert type(psf.AddS("w", 0, 1, np.float32(0.5)).scalar) is float  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        function.row = 2  # type: ignore[misc]


def test_every_psf_can_be_sent_to_another_process() -> None:
    """A psf could not be pickled, or contained a function that another process does not have."""
    for case in ALL_CASES:
        sent = case.function.require_importable()
        assert all(not callable(value) for value in vars(sent).values())
        received = pickle.loads(pickle.dumps(sent))
        assert (received, repr(received)) == (sent, repr(sent))
    assert psf.Map("w", 0, 1, np.exp).require_importable() == psf.Map("w", 0, 1, "numpy:exp")
    by_name = psf.Map("w", 0, 1, user_functions.twice_plus_one).require_importable()
    assert by_name == psf.Map("w", 0, 1, "parameter_server.psf.user_functions:twice_plus_one")


def test_a_function_that_another_process_cannot_import_is_refused() -> None:
    """The import failed in the other process, with an error about an unknown module."""

    def local(x: Any) -> Any:
        return x

    class Local(psf.UpdateFunction):
        matrix = "w"

        def partition_update(self, block: Any, part: Any) -> None: ...

    expected = (
        r"psf\.Map\(function=\): expected a function at the top level of a module, so that another process can import "
        r"it, given .*, which "
    )
    for function in (lambda x: x, local):
        with pytest.raises(ConfigurationError, match=expected + "is a lambda or is made inside a function"):
            psf.Map("w", 0, 1, function).require_importable()
    taken = wraps(user_functions.twice_plus_one)(local)
    main = FunctionType(local.__code__, {"__name__": "__main__"}, "top")
    main.__qualname__ = "top"
    with pytest.raises(ConfigurationError, match=expected + "is not what '.*user_functions:twice_plus_one' names"):
        psf.Map("w", 0, 1, taken).require_importable()
    with pytest.raises(ConfigurationError, match=expected + "is part of the program that was started"):
        psf.Map("w", 0, 1, main).require_importable()
    with pytest.raises(ConfigurationError, match=expected + "has no name of its own"):
        psf.Map("w", 0, 1, partial(local)).require_importable()
    with pytest.raises(ConfigurationError, match=r"psf\.Local: expected its class at the top level of a module"):
        Local().require_importable()


def test_numbers_too_large_for_float32_are_infinite() -> None:
    """Numbers too large for float32 caused a numpy warning, which was raised as an error."""
    driver = OnBlocks(Fixture("dense", "float32"), (5, 50))
    driver.update(psf.Fill("w", 3, 1e300))
    assert (driver.values()[3] == np.inf).all()
    driver.update(psf.Put("w", 3, np.full(100, -1e300)))
    assert (driver.values()[3] == -np.inf).all()
    driver.update(psf.MulS("w", 3, 3, 0))
    assert np.isnan(driver.values()[3]).all()


def test_whole_numbers_are_exact_and_wrap_around() -> None:
    """Through float64, 2⁵³ + 1 came back as 2⁵³."""
    for fixture in (Fixture("dense", "int64"), Fixture("sparse", "int64", default=0.0)):
        driver = OnBlocks(fixture, (5, 50))
        driver.update(psf.Fill("w", 0, 2**53 + 1))
        driver.update(psf.Fill("w", 1, 2**53))
        assert not driver.aggregate(psf.Equal("w", 0, 1))
        assert driver.aggregate(psf.Equal("w", 0, 1, tolerance=1))
        assert driver.aggregate(psf.Sum("w", 0)) == 100 * (2**53 + 1)
        driver.update(psf.Fill("w", 0, -(2**63)))
        driver.update(psf.Fill("w", 1, 2**63 - 1))
        assert not driver.aggregate(psf.Equal("w", 0, 1, tolerance=1e18))
        driver.update(psf.AddS("w", 1, 3, 1))
        assert driver.aggregate(psf.Equal("w", 0, 3))
        assert driver.aggregate(psf.Sum("w", 1)) == -100


def test_a_setting_of_a_derived_psf_may_have_a_type_that_only_type_checkers_know() -> None:
    """Checks of settings evaluated annotations of a user's class that exist only for type checkers."""

    @dataclass(frozen=True)
    class WithReason(psf.Copy):
        reason: Decimal | None = None

    assert WithReason("w", 0, 1).target == 1
    with pytest.raises(OutOfRange, match="source"):
        WithReason("w", -1, 1)


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


Array = np.ndarray[Any, Any]

SPARSE = Fixture("sparse", "float64", default=0.0, density=0.2)


def refused(driver: OnBlocks, function: Any) -> str:
    before = driver.values()
    with pytest.raises(ParameterServerError) as refusal:
        driver.update(function)
    assert driver.values().tobytes() == before.tobytes()
    return str(refusal.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_function_of_the_column_must_give_absent_columns_one_number(shape: str) -> None:
    """The number for the last block's absent columns became the default, and other absent columns read wrong."""
    driver = OnBlocks(SPARSE, SHAPES[shape])
    absent = np.flatnonzero(driver.initial[1] == 0)
    message = refused(driver, psf.MapWithIndex("w", 1, 3, lambda i, x: x + i))
    given = f"{float(absent[0])} for column {absent[0]} and {float(absent[1])} for column {absent[1]}"
    assert message == (
        "psf.MapWithIndex on matrix 'w': expected its function to return one number for all columns that are absent "
        f"from sparse rows, given {given}; use a dense matrix"
    )


def test_all_blocks_are_checked_before_one_is_changed() -> None:
    """The first blocks had the new values and the last block the old ones."""

    def fails_at_the_end(index: Array, x: Array) -> Array:
        if index.max() == 99:
            raise ValueError("no such column")
        return x

    for fixture in (SPARSE, Fixture("dense", "float64")):
        message = refused(OnBlocks(fixture, (5, 50)), psf.MapWithIndex("w", 1, 3, fails_at_the_end))
        assert message == (
            "psf.MapWithIndex on matrix 'w': expected its function to return an array, given ValueError: no such column"
        )


def test_maps_without_column_numbers_check_all_blocks_first() -> None:
    """A function that failed on one value left the blocks before it changed."""
    for fixture in (SPARSE, Fixture("dense", "float64")):
        driver = OnBlocks(fixture, (5, 50))
        bad = driver.initial[1, 50:].max()

        def fails_on_one(x: Array, bad: float = bad) -> Array:
            if (x == bad).any():
                raise ValueError("too much")
            return x + 1

        assert "given ValueError: too much" in refused(driver, psf.Map("w", 1, 3, fails_on_one))


def test_nan_may_be_the_default_of_absent_columns() -> None:
    """NaN is not equal to itself, so two equal defaults of NaN were taken for different numbers."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(psf.MapWithIndex("w", 1, 3, lambda i, x: np.where(x == 0, np.nan, i)))
    expected = np.where(driver.initial[1] == 0, np.nan, np.arange(100))
    np.testing.assert_array_equal(driver.values()[3], expected)
    assert driver.aggregate(psf.Size("w", 3)) == np.count_nonzero(driver.initial[1])


def test_a_row_without_absent_columns_accepts_any_function() -> None:
    """A function was refused because of absent columns that the row did not have."""
    driver = OnBlocks(Fixture("full", "float64", default=0.0), (5, 50))
    driver.update(psf.MapWithIndex("w", 1, 3, lambda i, x: i + x))
    np.testing.assert_array_equal(driver.values()[3], np.arange(100) + driver.initial[1])


@pytest.mark.parametrize(
    ("function", "default"),
    [
        (psf.Log("w", 1, 3), -np.inf),
        (psf.Div("w", 1, 1, 3), np.nan),
        (psf.Exp("w", 1, 3), 1.0),
        (psf.Fill("w", 3, 4), 4.0),
        (psf.Put("w", 3, np.zeros(100)), 0.0),
    ],
)
def test_values_equal_to_the_new_default_are_not_stored(function: Any, default: float) -> None:
    """Log stored −inf for every column of the row, and NaN was stored although the default was NaN."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(function)
    pulled = driver.aggregate(psf.PullSparse("w", 3))
    np.testing.assert_equal(pulled.default, default)
    assert len(pulled.columns) <= np.count_nonzero(driver.initial[1])


def test_random_numbers_fill_all_columns_of_a_sparse_row() -> None:
    """Random numbers were drawn only for the stored columns."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(psf.RandomUniform("w", 3, 1.0, 2.0, seed=3))
    assert driver.aggregate(psf.Size("w", 3)) == 100


def test_blocks_with_defaults_of_their_own_are_pulled_as_one_row() -> None:
    """One block's default was used for the columns of another block."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(psf.Fill("w", 1, 0.0))
    driver.update(psf.Increment("w", 1, np.ones(50), columns=np.arange(50)))
    driver.update(psf.MapWithIndex("w", 1, 3, lambda i, x: np.where(i < 50, i, 7.0)))
    pulled = driver.aggregate(psf.PullSparse("w", 3))
    values = np.full(100, pulled.default)
    values[pulled.columns] = pulled.values
    np.testing.assert_array_equal(values, np.where(np.arange(100) < 50, np.arange(100), 7.0))


def test_a_wide_sparse_row_is_computed_in_pieces() -> None:
    """Arguments for all absent columns at once took more memory than the sparse matrix saved."""
    from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
    from streamiter.parameter_server.storage import make_block

    matrix = Matrix("w", rows=2, columns=200_000, sparse=True, block=(2, 200_000))
    (place,) = MatrixPartitioning(matrix, shards=1).blocks
    block = make_block(matrix, place)
    block.add(0, np.array([5, 150_000]), np.array([1.0, 2.0]))
    longest = 0

    def watched(index: Array, x: Array) -> Array:
        nonlocal longest
        longest = max(longest, len(index))
        return np.where(x == 0, 3.0, index * x)

    psf.MapWithIndex("w", 0, 1, watched).partition_update(block, None)
    content = block.sparse_row(1)
    assert (content.columns.tolist(), content.values.tolist(), content.default) == ([5, 150_000], [5.0, 3e5], 3.0)
    assert longest <= 1 << 16
