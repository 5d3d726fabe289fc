"""What a matrix begins with, and what runs on its clock, checked before a shard makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.numbers import is_number
from streamiter.parameter_server.bounds import fits_int64
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import Partitioning
from streamiter.parameter_server.psf.function import UpdateFunction, check_function

__all__ = ["check_first_values", "init_functions", "init_values"]


def check_first_values(matrix: Matrix, partitioning: Partitioning) -> None:
    """Raise what is wrong with ``init=`` and ``on_clock=``: a function that fits no block would be none, silently."""
    functions = list(init_functions(matrix))
    if not functions:
        init_values(matrix)
    if matrix.on_clock is not None:
        if not isinstance(matrix.on_clock, UpdateFunction):
            raise ConfigurationError(
                f"matrix {matrix.name!r}, on_clock=: expected a psf that changes parameters such as psf.Optimize(…), "
                f"given {matrix.on_clock!r}"
            )
        functions.append(matrix.on_clock)
    for function in functions:
        check_function(function, matrix, partitioning)


def init_functions(matrix: Matrix) -> Sequence[UpdateFunction]:
    """The functions that ``init=`` names; none where it is numbers."""
    init = matrix.init
    given: Sequence[Any] = init if isinstance(init, (list, tuple)) else (init,)
    return given if given and all(isinstance(one, UpdateFunction) for one in given) else ()


def init_values(matrix: Matrix) -> npt.NDArray[Any] | None:
    """The numbers that ``init=`` gives, as (rows, columns); None where all are 0."""
    init, shape = matrix.init, (matrix.rows, matrix.columns)
    if is_number(init) and not init:
        return None
    where = f"matrix {matrix.name!r}, init="
    try:
        given = np.asarray(init)
    except ValueError:
        given = np.empty(0, object)
    are_numbers = fits_int64(given) if matrix.dtype == "int64" else given.dtype.kind in "iubf"
    if not are_numbers or given.shape not in ((), shape[1:], shape):
        shown = f"{init!r}" if given.ndim == 0 else f"{given.dtype} of shape {given.shape}"
        raise ConfigurationError(
            f"{where}: expected numbers of {matrix.dtype}: one, {matrix.columns:,} for each row, or "
            f"{matrix.rows:,} × {matrix.columns:,}; or psfs that change parameters; given {shown}"
        )
    return np.broadcast_to(given.astype(matrix.numpy_dtype, copy=False), shape)
