"""Every psf that changes parameters, with the same computation in plain numpy on the whole matrix."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from parameter_server.psf import user_functions

from streamiter.parameter_server import psf
from streamiter.parameter_server.psf import UpdateFunction

Array = np.ndarray[Any, Any]

FLOATS = ("float32", "float64")
ALL = (*FLOATS, "int64")


class Case(NamedTuple):
    function: UpdateFunction
    expected: Callable[[Array], None]
    """Makes the same change to the whole matrix, a numpy array of its dtype."""
    dtypes: tuple[str, ...] = ALL
    """The dtypes that the psf accepts; it is refused for others."""


def to(row: int, formula: Callable[[Array], Any]) -> Callable[[Array], None]:
    def change(matrix: Array) -> None:
        matrix[row] = formula(matrix)

    return change


def whole(formula: Callable[[Array], Any]) -> Callable[[Array], None]:
    def change(matrix: Array) -> None:
        matrix[:] = formula(matrix)

    return change


def round_up(values: Array) -> Array:
    """Round ties up, and keep values that are not finite."""
    half = values.dtype.type(0.5)
    return np.array([math.floor(x + half) if np.isfinite(x) else x for x in values])


def increment(matrix: Array) -> None:
    matrix[3, 99] += 1
    matrix[3, 0] += 2
    matrix[3, 51] += 3
    matrix[3, 0] += 4


def put(matrix: Array) -> None:
    matrix[3, [99, 0, 51]] = 1, 4, 3


def sparse_push(matrix: Array) -> None:
    matrix[3] = 0
    matrix[3, [99, 0, 51]] = [1, 4, 3]


def compressed(delta: Any, bits: int) -> Callable[[Array], None]:
    """Return a change that adds each number rounded to the nearest point, one by one."""
    largest, last = max(map(abs, delta)), 2 ** (bits - 1) - 1
    return to(1, lambda m: m[1] + np.array([round(x / largest * last) / last * largest for x in delta], m.dtype))


def fill_two(matrix: Array) -> None:
    matrix[9] = 4
    matrix[1] = -3


def box_muller(seed: int, row: int) -> Array:
    """Return normal numbers from the raw words of the row, two words for each column, one by one."""
    words = np.random.Philox(key=np.array([seed, row], np.uint64)).random_raw(200).tolist()
    return np.array(
        [
            math.sqrt(-2.0 * math.log(((first >> 11) + 1) / 2**53)) * math.cos(2.0 * math.pi * (second >> 11) / 2**53)
            for first, second in zip(words[0::2], words[1::2], strict=True)
        ]
    )


def unit(seed: int, row: int) -> Array:
    words = np.random.Philox(key=np.array([seed, row], np.uint64)).random_raw(100).tolist()
    return np.array([(word >> 11) / 2**53 for word in words])


def every_row(draw: Callable[[int, int], Array], seed: int) -> Array:
    return np.array([draw(seed, row) for row in range(10)])


def on_the_diagonal(matrix: Array, values: Any) -> None:
    matrix[:] = 0
    np.fill_diagonal(matrix, values)


ROW = np.arange(100) * 3 - 150
ROW_OF_FRACTIONS = np.linspace(-2.0, 2.0, 100)
XAVIER = 1.5 * math.sqrt(2.0 / (30 + 20))

CASES: tuple[Case, ...] = (
    # Functions of one row.
    Case(psf.Abs("w", 1, 3), to(3, lambda m: np.abs(m[1]))),
    Case(psf.Abs("w", source=1, to=1), to(1, lambda m: np.abs(m[1]))),
    Case(psf.Ceil("w", 1, 3), to(3, lambda m: np.ceil(m[1]))),
    Case(psf.Copy("w", 1, 3), to(3, lambda m: m[1])),
    Case(psf.Copy("w", 1, 1), to(1, lambda m: m[1])),
    Case(psf.Exp("w", 1, 3), to(3, lambda m: np.exp(m[1])), FLOATS),
    Case(psf.Exp("w", 1, 1), to(1, lambda m: np.exp(m[1])), FLOATS),
    Case(psf.Expm1("w", 1, 3), to(3, lambda m: np.expm1(m[1])), FLOATS),
    Case(psf.Floor("w", 1, 3), to(3, lambda m: np.floor(m[1]))),
    Case(psf.Log("w", 1, 3), to(3, lambda m: np.log(m[1])), FLOATS),
    Case(psf.Log10("w", 0, 3), to(3, lambda m: np.log10(m[0])), FLOATS),
    Case(psf.Log1p("w", 0, 3), to(3, lambda m: np.log1p(m[0])), FLOATS),
    Case(psf.Round("w", 1, 3), to(3, lambda m: round_up(m[1]))),
    Case(psf.Round("w", 0, 0), to(0, lambda m: round_up(m[0]))),
    Case(psf.Signum("w", 1, 3), to(3, lambda m: np.sign(m[1]))),
    Case(psf.Sqrt("w", 1, 3), to(3, lambda m: np.sqrt(m[1])), FLOATS),
    # Functions of two rows.
    Case(psf.Add("w", 0, 1, to=3), to(3, lambda m: m[0] + m[1])),
    Case(psf.Add("w", 1, 1, to=1), to(1, lambda m: m[1] + m[1])),
    Case(psf.Sub("w", 0, 1, to=3), to(3, lambda m: m[0] - m[1])),
    Case(psf.Sub("w", 0, 1, to=1), to(1, lambda m: m[0] - m[1])),
    Case(psf.Mul("w", 0, 1, to=3), to(3, lambda m: m[0] * m[1])),
    Case(psf.Div("w", 0, 1, to=3), to(3, lambda m: m[0] / m[1]), FLOATS),
    Case(psf.Div("w", 0, 0, to=0), to(0, lambda m: m[0] / m[0]), FLOATS),
    Case(psf.MaxV("w", 0, 1, to=3), to(3, lambda m: np.maximum(m[0], m[1]))),
    Case(psf.MinV("w", 0, 1, to=0), to(0, lambda m: np.minimum(m[0], m[1]))),
    # Functions of a row and a number.
    Case(psf.AddS("w", 1, 3, 2.0), to(3, lambda m: m[1] + m.dtype.type(2))),
    Case(psf.AddS("w", source=1, to=1, scalar=0.25), to(1, lambda m: m[1] + m.dtype.type(0.25)), FLOATS),
    Case(psf.SubS("w", 1, 3, 5), to(3, lambda m: m[1] - 5)),
    Case(psf.MulS("w", 1, 3, -3.0), to(3, lambda m: m[1] * m.dtype.type(-3))),
    Case(psf.DivS("w", 1, 3, 4), to(3, lambda m: m[1] / 4), FLOATS),
    Case(psf.Pow("w", 1, 3, 2), to(3, lambda m: m[1] * m[1])),
    Case(psf.Pow("w", 0, 3, -0.5), to(3, lambda m: m[0] ** m.dtype.type(-0.5)), FLOATS),
    # In place.
    Case(psf.Fill("w", 3, 4.0), to(3, lambda m: 4)),
    Case(psf.Fill("w", row=3, value=math.nan), to(3, lambda m: math.nan), FLOATS),
    Case(psf.Fill("w", row=[9, 1], value=[4, -3]), fill_two),
    Case(psf.Fill("w", row=range(10), value=0.5), whole(lambda m: 0.5), FLOATS),
    Case(psf.Reset("w", row=1), to(1, lambda m: 0)),
    Case(psf.Reset("w", row=range(10)), whole(lambda m: 0)),
    Case(psf.Scale("w", 1, 3.0), to(1, lambda m: m[1] * m.dtype.type(3))),
    Case(psf.Scale("w", 1, 0.1), to(1, lambda m: m[1] * m.dtype.type(0.1)), FLOATS),
    Case(psf.Axpy("w", x=0, y=1, a=2.0), to(1, lambda m: m.dtype.type(2) * m[0] + m[1])),
    Case(psf.Axpy("w", 1, 1, -1.0), to(1, lambda m: m.dtype.type(-1) * m[1] + m[1])),
    Case(psf.Increment("w", 1, ROW), to(1, lambda m: m[1] + ROW.astype(m.dtype))),
    Case(
        psf.Increment("w", row=1, delta=ROW_OF_FRACTIONS),
        to(1, lambda m: m[1] + ROW_OF_FRACTIONS.astype(m.dtype)),
        FLOATS,
    ),
    Case(psf.Put("w", 1, ROW), to(1, lambda m: ROW)),
    Case(psf.MaxA("w", 1, ROW), to(1, lambda m: np.maximum(m[1], ROW.astype(m.dtype)))),
    Case(psf.MinA("w", 1, ROW), to(1, lambda m: np.minimum(m[1], ROW.astype(m.dtype)))),
    Case(psf.Increment("w", 3, [1, 2, 3, 4], columns=[99, 0, 51, 0]), increment),
    Case(psf.Increment("w", 3, [], []), lambda m: None, FLOATS),
    Case(psf.Put("w", 3, [1, 2, 3, 4], columns=[99, 0, 51, 0]), put),
    Case(psf.Push("w", 1, ROW), to(1, lambda m: ROW)),
    Case(psf.Push("w", row=3, values=ROW_OF_FRACTIONS), to(3, lambda m: ROW_OF_FRACTIONS), FLOATS),
    Case(psf.SparsePush("w", 3, [99, 0, 51, 0], [1, 2, 3, 4]), sparse_push),
    Case(psf.SparsePush("w", 3, [], []), to(3, lambda m: 0), FLOATS),
    Case(psf.CompressUpdate("w", 1, ROW_OF_FRACTIONS), compressed(ROW_OF_FRACTIONS, 8), FLOATS),
    Case(psf.CompressUpdate("w", 1, ROW, bits=16), compressed(ROW, 16), FLOATS),
    Case(
        psf.CompressUpdate("w", row=1, delta=ROW_OF_FRACTIONS, bits=32),
        to(1, lambda m: m[1] + ROW_OF_FRACTIONS),
        FLOATS,
    ),
    Case(psf.CompressUpdate("w", 1, np.zeros(100)), lambda m: None, FLOATS),
    # Random.
    Case(psf.RandomNormal("w", 3, 1.0, 2.0, seed=9), to(3, lambda m: 1.0 + 2.0 * box_muller(9, 3)), FLOATS),
    Case(psf.RandomNormal("w", None, 0, 1, seed=2**64 - 1), whole(lambda m: every_row(box_muller, 2**64 - 1)), FLOATS),
    Case(psf.RandomUniform("w", 4, -1.0, 3.0, seed=0), to(4, lambda m: -1.0 + 4.0 * unit(0, 4)), FLOATS),
    Case(psf.RandomUniform("w", row=None, low=2, high=3, seed=1), whole(lambda m: 2.0 + every_row(unit, 1)), FLOATS),
    Case(psf.XavierNormal("w", 1.5, 30, 20, seed=4), whole(lambda m: XAVIER * every_row(box_muller, 4)), FLOATS),
    Case(psf.XavierNormal("w", 1.5, 30, 20, seed=4, row=2), to(2, lambda m: XAVIER * box_muller(4, 2)), FLOATS),
    Case(
        psf.XavierUniform("w", gain=1.5, fan_in=30, fan_out=20, seed=4),
        whole(lambda m: math.sqrt(3.0) * XAVIER * (2.0 * every_row(unit, 4) - 1.0)),
        FLOATS,
    ),
    Case(
        psf.XavierUniform("w", 1.5, 30, 20, seed=4, row=2),
        to(2, lambda m: math.sqrt(3.0) * XAVIER * (2.0 * unit(4, 2) - 1.0)),
        FLOATS,
    ),
    Case(
        psf.KaimingNormal("w", 2.0, 25, seed=4),
        whole(lambda m: 2.0 * math.sqrt(1 / 25) * every_row(box_muller, 4)),
        FLOATS,
    ),
    Case(psf.KaimingNormal("w", gain=2.0, fan_in=25, seed=4, row=0), to(0, lambda m: 0.4 * box_muller(4, 0)), FLOATS),
    # The user's functions.
    Case(psf.Map("w", 1, 3, user_functions.twice_plus_one), to(3, lambda m: 2 * m[1] + 1)),
    Case(psf.Map("w", 1, 1, "parameter_server.psf.user_functions:twice_plus_one"), to(1, lambda m: 2 * m[1] + 1)),
    Case(psf.Map("w", 1, 3, "numpy:tanh"), to(3, lambda m: np.tanh(m[1])), FLOATS),
    Case(psf.Zip2Map("w", 0, 1, 3, user_functions.difference), to(3, lambda m: m[0] - 3 * m[1])),
    Case(
        psf.Zip3Map("w", 0, 1, 2, to=3, function=user_functions.median),
        to(3, lambda m: user_functions.median(m[0], m[1], m[2])),
    ),
    Case(
        psf.MapWithIndex("w", 1, 3, user_functions.with_index),
        to(3, lambda m: user_functions.with_index(np.arange(100), m[1])),
    ),
    Case(
        psf.Zip2MapWithIndex("w", 0, 1, 1, user_functions.with_index_2),
        to(1, lambda m: user_functions.with_index_2(np.arange(100), m[0], m[1])),
    ),
    Case(
        psf.Zip3MapWithIndex("w", 0, 1, 2, to=3, function=user_functions.with_index_3),
        to(3, lambda m: user_functions.with_index_3(np.arange(100), m[0], m[1], m[2])),
    ),
    # The whole matrix.
    Case(psf.FullFill("w", 3), whole(lambda m: 3)),
    Case(psf.FullFill("w", value=-0.5), whole(lambda m: -0.5), FLOATS),
    Case(psf.Eye("w"), lambda m: on_the_diagonal(m, 1)),
    Case(psf.Diag("w", range(1, 11)), lambda m: on_the_diagonal(m, range(1, 11))),
)
