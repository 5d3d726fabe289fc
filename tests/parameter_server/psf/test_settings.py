"""How psfs are written, compared and sent, and which settings are refused where they are written."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from parameter_server.psf import aggregate_cases, update_cases, user_functions
from parameter_server.psf.on_blocks import Fixture, OnBlocks

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError, RowsInDifferentBlocks
from streamiter.parameter_server import psf

if TYPE_CHECKING:
    from decimal import Decimal

WRONG_WHERE_WRITTEN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a row below 0": (
        lambda: psf.Abs("w", -1, 0),
        OutOfRange,
        "psf.Abs(source=): expected a whole number of at least 0, given -1",
    ),
    "a row that is a fraction": (
        lambda: psf.Add("w", 0, 1, to=2.0),  # type: ignore[arg-type]
        OutOfRange,
        "psf.Add(to=): expected a whole number of at least 0, given 2.0",
    ),
    "a number that is none": (
        lambda: psf.Scale("w", 0, "2"),  # type: ignore[arg-type]
        ConfigurationError,
        "psf.Scale(scalar=): expected a number, given '2'",
    ),
    "a number that no float holds": (
        lambda: psf.Fill("w", 0, -(10**400)),
        ConfigurationError,
        "psf.Fill(value=): expected a number up to 1.8e308, as a float64 holds, given one of 1,329 bits",
    ),
    "division by 0": (
        lambda: psf.DivS("w", 0, 1, 0.0),
        ConfigurationError,
        "psf.DivS(scalar=): expected a number other than 0, given 0.0",
    ),
    "a table for a row": (
        lambda: psf.Put("w", 0, [[1.0, 2.0]]),
        ConfigurationError,
        "psf.Put(values=): expected a one-dimensional array of numbers, given float64 of shape (1, 2)",
    ),
    "words for numbers": (
        lambda: psf.Increment("w", 0, ["a"]),
        ConfigurationError,
        "psf.Increment(delta=): expected a one-dimensional array of numbers, given <U1 of shape (1,)",
    ),
    "columns and values that do not match": (
        lambda: psf.SparsePush("w", 0, [1, 2], [1.0]),
        ConfigurationError,
        "psf.SparsePush: expected as many values as columns, given 1 values and 2 columns",
    ),
    "deltas and columns that do not match": (
        lambda: psf.Increment("w", 0, [1.0], columns=[1, 2]),
        ConfigurationError,
        "psf.Increment: expected as many delta as columns, given 1 delta and 2 columns",
    ),
    "bits that no array has": (
        lambda: psf.CompressUpdate("w", 0, [1.0], bits=4),
        ConfigurationError,
        "psf.CompressUpdate(bits=): expected 8, 16 or 32, given 4",
    ),
    "a number that has no place among points": (
        lambda: psf.CompressUpdate("w", 0, [1.0, math.inf]),
        ConfigurationError,
        "psf.CompressUpdate(delta=): expected finite numbers, given inf; add it with psf.Increment",
    ),
    "fewer values than rows": (
        lambda: psf.Fill("w", [1, 2, 3], [1.0, 2.0]),
        ConfigurationError,
        "psf.Fill(value=): expected one number, or as many as rows, given 2 and 3 rows",
    ),
    "columns that are fractions": (
        lambda: psf.Pull("w", 0, [1.5]),
        ConfigurationError,
        "psf.Pull(columns=): expected a one-dimensional array of whole numbers, given float64 of shape (1,)",
    ),
    "a seed below 0": (
        lambda: psf.RandomNormal("w", 0, 0.0, 1.0, seed=-1),
        ConfigurationError,
        "psf.RandomNormal(seed=): expected a whole number from 0 to 18,446,744,073,709,551,615, given -1",
    ),
    "a negative deviation": (
        lambda: psf.RandomNormal("w", 0, 0.0, -1.0, seed=1),
        ConfigurationError,
        "psf.RandomNormal(std=): expected a number of 0 or more, given -1.0",
    ),
    "a mean without end": (
        lambda: psf.RandomNormal("w", 0, math.inf, 1.0, seed=1),
        ConfigurationError,
        "psf.RandomNormal(mean=): expected a finite number, given inf",
    ),
    "bounds the wrong way round": (
        lambda: psf.RandomUniform("w", 0, 2.0, 1.0, seed=1),
        ConfigurationError,
        "psf.RandomUniform: expected low ≤ high, given low=2.0 and high=1.0",
    ),
    "no inputs": (
        lambda: psf.XavierNormal("w", 1.0, 0, 0, seed=1),
        ConfigurationError,
        "psf.XavierNormal(fan_in=): expected a number above 0, given 0",
    ),
    "a number for a function": (
        lambda: psf.Map("w", 0, 1, 3),  # type: ignore[arg-type]
        ConfigurationError,
        "psf.Map(function=): expected a function or its name as 'module:function', given 3",
    ),
    "a tolerance below 0": (
        lambda: psf.Equal("w", 0, 1, tolerance=-1.0),
        ConfigurationError,
        "psf.Equal(tolerance=): expected a number of 0 or more, given -1.0",
    ),
}


@pytest.mark.parametrize("name", WRONG_WHERE_WRITTEN)
def test_wrong_settings_are_refused_where_they_are_written(name: str) -> None:
    """The error came from a shard in another process and named no line of the user's code."""
    write, error, message = WRONG_WHERE_WRITTEN[name]
    with pytest.raises(error) as refusal:
        write()
    assert str(refusal.value) == message


def test_a_random_psf_needs_a_seed() -> None:
    """A run with random initial values could not be repeated."""
    with pytest.raises(TypeError, match="seed"):
        psf.RandomNormal("w", 0, 0.0, 1.0)  # type: ignore[call-arg]


WRONG_FOR_THE_MATRIX: dict[str, tuple[Any, type[Exception], str]] = {
    "width": (
        psf.Put("w", 0, np.zeros(99)),
        ParameterServerError,
        "psf.Put on matrix 'w', values=: expected 100 numbers, one for each column, given 99",
    ),
    "diagonal": (
        psf.Diag("w", [1, 2]),
        ParameterServerError,
        "psf.Diag on matrix 'w', values=: expected 10 numbers, as the diagonal of 10 × 100 has, given 2",
    ),
    "column": (
        psf.Increment("w", 0, [1, 1], columns=[5, 100]),
        OutOfRange,
        "psf.Increment on matrix 'w': expected columns from 0 to 99, given column 100",
    ),
    "column below 0": (
        psf.Pull("w", 0, [5, -1]),
        OutOfRange,
        "psf.Pull on matrix 'w': expected columns from 0 to 99, given column -1",
    ),
    "fractions": (
        psf.Sqrt("w", 0, 1),
        ParameterServerError,
        "psf.Sqrt on matrix 'w': expected a matrix of float32 or float64, because its results are fractions; "
        "given int64",
    ),
    "a fraction": (
        psf.Axpy("w", 0, 1, a=0.5),
        ParameterServerError,
        "psf.Axpy on matrix 'w', a=: expected whole numbers of 64 bits, as in the matrix, given 0.5",
    ),
    "too large": (
        psf.Fill("w", 0, 2**63),
        ParameterServerError,
        "psf.Fill on matrix 'w', value=: expected whole numbers of 64 bits, as in the matrix, "
        "given 9223372036854775808",
    ),
    "not a number": (
        psf.FullFill("w", math.nan),
        ParameterServerError,
        "psf.FullFill on matrix 'w', value=: expected whole numbers of 64 bits, as in the matrix, given nan",
    ),
    "an array of fractions": (
        psf.MaxA("w", 0, np.zeros(100)),
        ParameterServerError,
        "psf.MaxA on matrix 'w', other=: expected whole numbers of 64 bits, as in the matrix, given float64",
    ),
    "a negative exponent": (
        psf.Pow("w", 0, 1, -2),
        ParameterServerError,
        "psf.Pow on matrix 'w', exponent=: expected a number of 0 or more, because the matrix stores int64, given -2",
    ),
    "no such module": (
        psf.Map("w", 0, 1, "no_such_module:f"),
        ConfigurationError,
        "psf.Map(function=): expected a function that can be imported, given 'no_such_module:f': "
        "No module named 'no_such_module'; if the module exists, add its folder to PYTHONPATH",
    ),
    "no name": (
        psf.Map("w", 0, 1, "exp"),
        ConfigurationError,
        "psf.Map(function=): expected a function or its name as 'module:function', given 'exp'",
    ),
    "not a function": (
        psf.Map("w", 0, 1, "math:pi"),
        ConfigurationError,
        "psf.Map(function=): expected a function, given 'math:pi', which is 3.141592653589793",
    ),
    "one number for all": (
        psf.Map("w", 0, 1, np.sum),
        ParameterServerError,
        "psf.Map on matrix 'w': expected its function to return an array of shape (50,), as its arguments have, "
        "given ()",
    ),
    "fractions from a function": (
        psf.Map("w", 0, 1, np.sqrt),
        ParameterServerError,
        "psf.Map on matrix 'w': expected its function to return whole numbers, for a matrix of int64; given float64",
    ),
    "words from a function": (
        psf.Map("w", 0, 1, lambda x: x.astype(str)),
        ParameterServerError,
        "psf.Map on matrix 'w': expected its function to return whole numbers, for a matrix of int64; given <U21",
    ),
    "an argument changed": (
        psf.Map("w", 0, 1, lambda x: x.fill(0)),
        ParameterServerError,
        "psf.Map on matrix 'w': expected its function to return an array, given ValueError: "
        "assignment destination is read-only",
    ),
}


@pytest.mark.parametrize("name", WRONG_FOR_THE_MATRIX)
def test_settings_that_do_not_fit_the_matrix_are_refused_before_it_changes(name: str) -> None:
    """A row of another width was cut off silently, or half of the blocks had changed when the error came."""
    function, error, message = WRONG_FOR_THE_MATRIX[name]
    driver = OnBlocks(Fixture("dense", "int64"), (5, 50))
    run: Any = driver.aggregate if isinstance(function, psf.GetFunction) else driver.update
    with pytest.raises(error) as refusal:
        run(function)
    assert str(refusal.value) == message
    assert driver.values().tobytes() == driver.initial.tobytes()


def test_rows_must_exist_in_one_row_block() -> None:
    """A row that did not exist was a silent no-op. Rows on different shards cannot be combined on a shard."""
    driver = OnBlocks(Fixture("dense", "float64"), (5, 50))
    with pytest.raises(OutOfRange, match="from 0 to 9, given 10"):
        driver.update(psf.Copy("w", 0, 10))
    with pytest.raises(RowsInDifferentBlocks, match=r"given rows 4, 5"):
        driver.aggregate(psf.Dot("w", 4, 5))
    with pytest.raises(RowsInDifferentBlocks, match=r"given rows 0, 1, 9"):
        driver.update(psf.Add("w", 0, 1, to=9))


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
