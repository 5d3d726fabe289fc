"""Every aggregate, with the same computation in plain numpy on the whole matrix."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streamiter.parameter_server import psf
from streamiter.parameter_server.psf import GetFunction

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    function: GetFunction
    expected: Callable[[Array, float | None], Any]
    """Computes the expected result from the whole matrix and its default, which is None for a dense matrix."""


def exact(row: Array) -> Array:
    """Return the row in the type in which sums are computed."""
    return row if row.dtype.kind == "i" else row.astype(np.float64)


def is_equal(x: Array, y: Array, tolerance: float) -> bool:
    return all(a == b or abs(float(a) - float(b)) <= tolerance for a, b in zip(x, y, strict=True))


def stored(matrix: Array, default: float | None) -> int:
    return matrix.shape[1] if default is None else int((matrix[1] != default).sum())


SOME_COLUMNS = [99, 0, 50, 0, 49]

CASES: tuple[Case, ...] = (
    Case(psf.Sum("w", row=1), lambda m, _: exact(m[1]).sum()),
    Case(psf.Sum("w", 0), lambda m, _: exact(m[0]).sum()),
    Case(psf.Dot("w", 0, 1), lambda m, _: (exact(m[0]) * exact(m[1])).sum()),
    Case(psf.Dot("w", first=1, second=1), lambda m, _: (exact(m[1]) ** 2).sum()),
    Case(psf.Max("w", 1), lambda m, _: m[1].max()),
    Case(psf.Min("w", 1), lambda m, _: m[1].min()),
    Case(psf.Amax("w", 1), lambda m, _: np.abs(m[1]).max()),
    Case(psf.Amin("w", 1), lambda m, _: np.abs(m[1]).min()),
    Case(psf.Asum("w", 1), lambda m, _: np.abs(exact(m[1])).sum()),
    Case(psf.Nnz("w", 1), lambda m, _: (m[1] != 0).sum()),
    Case(psf.Nrm2("w", 1), lambda m, _: np.sqrt((m[1].astype(np.float64) ** 2).sum())),
    Case(psf.Equal("w", 0, 1), lambda m, _: is_equal(m[0], m[1], 1e-10)),
    Case(psf.Equal("w", 2, 2), lambda m, _: True),
    Case(psf.Equal("w", 1, 1), lambda m, _: not np.isnan(m[1]).any()),
    Case(psf.Equal("w", 1, 1, equal_nan=True), lambda m, _: True),
    Case(psf.Equal("w", 0, 1, tolerance=40.0), lambda m, _: is_equal(m[0], m[1], 40.0)),
    Case(psf.Pull("w", row=1), lambda m, _: m[1]),
    Case(psf.Pull("w", 1, SOME_COLUMNS), lambda m, _: m[1, SOME_COLUMNS]),
    Case(psf.Pull("w", row=1, columns=[]), lambda m, _: m[1, []]),
    Case(psf.FullPull("w"), lambda m, _: m),
    Case(psf.PullSparse("w", 1), lambda m, default: np.flatnonzero(m[1] != (0 if default is None else default))),
    Case(psf.Size("w", 1), stored),
)
