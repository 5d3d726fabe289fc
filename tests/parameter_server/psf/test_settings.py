"""How psfs are written, compared and sent; ``refusals.txt`` has the settings that are refused."""

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
from parameter_server.psf.on_blocks import Fixture, OnBlocks

from streamiter.errors import ConfigurationError, OutOfRange
from streamiter.parameter_server import psf

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
