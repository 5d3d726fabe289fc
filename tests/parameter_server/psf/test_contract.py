"""Every psf on dense and sparse matrices of each dtype, cut into blocks of several shapes, compared with numpy."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from parameter_server.psf import aggregate_cases, update_cases
from parameter_server.psf.on_blocks import ROWS, SHAPES, Fixture, OnBlocks, fixtures

from streamiter.errors import ParameterServerError
from streamiter.parameter_server import psf
from streamiter.parameter_server.matrix import DTYPES, DType
from streamiter.parameter_server.storage.block import BlockRow

TOLERANCE = 1e-6

CUT = [shape for shape in SHAPES if shape != "whole"]
"""The shapes of blocks that cut the matrix."""

TABLE = """
Abs Ceil Exp Expm1 Floor Log Log10 Log1p Signum Sqrt Round Copy Fill Add Sub Mul Div MaxV MinV AddS DivS MulS Pow Scale
Axpy Increment Put MaxA MinA RandomNormal RandomUniform Map MapWithIndex Zip2Map Zip2MapWithIndex Zip3Map
Zip3MapWithIndex
"""

TESTED_ELSEWHERE = {"Optimize", "InitialSlots"}
"""Psfs that are tested with the optimizers."""


@pytest.fixture(scope="module")
def on_blocks() -> Any:
    """Make each matrix once; a test resets it after each psf."""
    return cache(lambda fixture, shape: OnBlocks(fixture, SHAPES[shape]))


def ids(cases: Any) -> list[str]:
    numbered: dict[str, int] = {}
    names = []
    for case in cases:
        name = case.function.name
        numbered[name] = numbered.get(name, 0) + 1
        names.append(f"{name} {numbered[name]}")
    return names


def pairs(dtypes: Iterable[DType]) -> Iterator[tuple[Fixture, str]]:
    """Yield each fixture of each dtype with one shape of blocks; every pair of two of the three occurs."""
    for first, dtype in enumerate(dtypes):
        for number, fixture in enumerate(fixtures(dtype), first):
            yield fixture, CUT[number % len(CUT)]


@pytest.mark.parametrize("case", update_cases.CASES, ids=ids(update_cases.CASES))
def test_an_update_gives_what_numpy_gives_however_the_matrix_is_stored(case: update_cases.Case, on_blocks: Any) -> None:
    """A psf computed the values of sparse rows and forgot the default; another wrote past its own block's columns."""
    for fixture, shape in pairs(dtype for dtype in DTYPES if dtype in case.dtypes):
        expected = fixture.values()
        with np.errstate(all="ignore"):
            case.expected(expected)
        whole, cut = (updated(on_blocks(fixture, each), case.function) for each in ("whole", shape))
        place = f"{case.function}, {fixture}, blocks: "
        np.testing.assert_allclose(whole, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=place + "whole")
        assert cut.tobytes() == whole.tobytes(), f"{place}{shape} differs from whole"
    for dtype in set(DTYPES) - set(case.dtypes):
        with pytest.raises(ParameterServerError, match=rf"psf\.{case.function.name} on matrix 'w'.*given"):
            on_blocks(Fixture("dense", dtype), "whole").update(case.function)


def updated(driver: OnBlocks, function: psf.UpdateFunction) -> Any:
    """Return the matrix after the update, and reset the blocks."""
    driver.update(function)
    values = driver.values()
    driver.reset(function.rows(driver.matrix) or range(ROWS))
    return values


@pytest.mark.parametrize("case", aggregate_cases.CASES, ids=ids(aggregate_cases.CASES))
def test_an_aggregate_gives_what_numpy_gives_however_the_matrix_is_stored(
    case: aggregate_cases.Case, on_blocks: Any
) -> None:
    """The absent columns of a sparse row with a default other than 0 were once left out of its sum."""
    for fixture, cut in pairs(DTYPES):
        with np.errstate(all="ignore"):
            expected = case.expected(fixture.values(), fixture.default)
        for shape in ("whole", cut):
            given = on_blocks(fixture, shape).aggregate(case.function)
            where = f"{case.function}, {fixture}, blocks: {shape}"
            if isinstance(given, BlockRow):
                assert given.columns.tolist() == expected.tolist(), where
                np.testing.assert_array_equal(given.values, fixture.values()[1, expected], err_msg=where)
            elif isinstance(given, np.ndarray):
                assert given.dtype == fixture.dtype, where
                np.testing.assert_array_equal(given, expected, err_msg=where)
            else:
                assert type(given) is type(expected.item() if isinstance(expected, np.generic) else expected), where
                np.testing.assert_allclose(given, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=where)


def test_every_psf_has_a_case() -> None:
    """A psf without a case was compared with nothing."""
    exported = {
        name
        for name in psf.__all__
        if name not in {"PartitionFunction", "UpdateFunction", "GetFunction"} | TESTED_ELSEWHERE
    }
    tested = {case.function.name for case in (*update_cases.CASES, *aggregate_cases.CASES)}
    assert exported == tested


def test_all_37_functions_of_the_table_exist() -> None:
    """A function that users know by its name from other systems was missing."""
    assert len(TABLE.split()) == 37
    assert set(TABLE.split()) <= set(psf.__all__)
