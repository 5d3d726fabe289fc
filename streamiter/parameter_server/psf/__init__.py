"""Functions that run on the shards, where the parameters are stored (psf: parameter server function).

An update function changes parameters (``client.update(psf.Axpy(…))``); a get function computes a result from them
(``client.aggregate(psf.Sum(…))``). The first argument of each is the name of the matrix. ``PartitionFunction`` says how
to write one.

>>> import asyncio
>>> from streamiter.parameter_server import ParameterServer, psf
>>> async def main() -> float:
...     async with ParameterServer(shards=2) as server:
...         await server.create_matrix("w", rows=2, columns=3, init=[1.0, 2.0, 3.0])
...         await server.update(psf.Axpy("w", x=0, y=1, a=2.0))
...         return await server.aggregate(psf.Sum("w", row=1))
>>> asyncio.run(main())
18.0

Functions that differ in a formula only are a table: a row has the family (which arguments there are), the name (as in
Angel), the formula, numpy's function, and the rule for int64 if whole numbers are not computed as floats are.
"""

import math

import numpy as np

from streamiter.parameter_server.psf.aggregates import Dot, Equal, FullPull, NumberOfRow, Pull, PullSparse, Size
from streamiter.parameter_server.psf.elementwise import (
    Axpy,
    DivS,
    Map,
    MapWithIndex,
    OneRow,
    Pow,
    RowAndNumber,
    Scale,
    TwoRows,
    Zip2Map,
    Zip2MapWithIndex,
    Zip3Map,
    Zip3MapWithIndex,
    round_up,
)
from streamiter.parameter_server.psf.function import GetFunction, PartitionFunction, UpdateFunction, member
from streamiter.parameter_server.psf.optimize import InitialSlots, Optimize
from streamiter.parameter_server.psf.random import (
    KaimingNormal,
    RandomNormal,
    RandomUniform,
    XavierNormal,
    XavierUniform,
)
from streamiter.parameter_server.psf.rows import (
    CompressUpdate,
    Diag,
    Eye,
    Fill,
    FullFill,
    Increment,
    MaxA,
    MinA,
    Push,
    Put,
    Reset,
    SparsePush,
)

__all__ = [
    "Abs",
    "Add",
    "AddS",
    "Amax",
    "Amin",
    "Asum",
    "Axpy",
    "Ceil",
    "CompressUpdate",
    "Copy",
    "Diag",
    "Div",
    "DivS",
    "Dot",
    "Equal",
    "Exp",
    "Expm1",
    "Eye",
    "Fill",
    "Floor",
    "FullFill",
    "FullPull",
    "GetFunction",
    "Increment",
    "InitialSlots",
    "KaimingNormal",
    "Log",
    "Log1p",
    "Log10",
    "Map",
    "MapWithIndex",
    "Max",
    "MaxA",
    "MaxV",
    "Min",
    "MinA",
    "MinV",
    "Mul",
    "MulS",
    "Nnz",
    "Nrm2",
    "Optimize",
    "PartitionFunction",
    "Pow",
    "Pull",
    "PullSparse",
    "Push",
    "Put",
    "RandomNormal",
    "RandomUniform",
    "Reset",
    "Round",
    "Scale",
    "Signum",
    "Size",
    "SparsePush",
    "Sqrt",
    "Sub",
    "SubS",
    "Sum",
    "UpdateFunction",
    "XavierNormal",
    "XavierUniform",
    "Zip2Map",
    "Zip2MapWithIndex",
    "Zip3Map",
    "Zip3MapWithIndex",
]

Abs = member(OneRow, "Abs", "``|x|``", ufunc=np.absolute)
Ceil = member(OneRow, "Ceil", "the least whole number that is not below x", ufunc=np.ceil, int64="copied")
Copy = member(OneRow, "Copy", "x", ufunc=np.positive, int64="copied")
Exp = member(OneRow, "Exp", "eˣ", ufunc=np.exp, int64="refused")
Expm1 = member(OneRow, "Expm1", "eˣ − 1, precise near 0", ufunc=np.expm1, int64="refused")
Floor = member(OneRow, "Floor", "the greatest whole number that is not above x", ufunc=np.floor, int64="copied")
Log = member(OneRow, "Log", "the natural logarithm (−inf for 0, NaN below 0)", ufunc=np.log, int64="refused")
Log10 = member(OneRow, "Log10", "the logarithm to base 10", ufunc=np.log10, int64="refused")
Log1p = member(OneRow, "Log1p", "log(1 + x), precise near 0", ufunc=np.log1p, int64="refused")
Round = member(OneRow, "Round", "⌊x + ½⌋, so ties go up (−0.5 → 0, 2.5 → 3)", ufunc=round_up, int64="copied")
Signum = member(OneRow, "Signum", "−1, 0 or 1, the sign (NaN for NaN)", ufunc=np.sign)
Sqrt = member(OneRow, "Sqrt", "the square root (NaN below 0)", ufunc=np.sqrt, int64="refused")

Add = member(TwoRows, "Add", "x + y", ufunc=np.add)
Sub = member(TwoRows, "Sub", "x − y", ufunc=np.subtract)
Mul = member(TwoRows, "Mul", "x · y", ufunc=np.multiply)
Div = member(TwoRows, "Div", "x / y (x/0 = ±inf, 0/0 = NaN)", ufunc=np.divide, int64="refused")
MaxV = member(TwoRows, "MaxV", "the larger of x and y (NaN if one is NaN)", ufunc=np.maximum)
MinV = member(TwoRows, "MinV", "the smaller of x and y (NaN if one is NaN)", ufunc=np.minimum)

AddS = member(RowAndNumber, "AddS", "x + ``scalar``", ufunc=np.add)
SubS = member(RowAndNumber, "SubS", "x − ``scalar``", ufunc=np.subtract)
MulS = member(RowAndNumber, "MulS", "x · ``scalar``", ufunc=np.multiply)

Sum = member(NumberOfRow, "Sum", "Σ x", piece=np.sum)
Max = member(NumberOfRow, "Max", "the largest number (NaN if one is NaN)", piece=np.max, merge=np.max)
Min = member(NumberOfRow, "Min", "the smallest number (NaN if one is NaN)", piece=np.min, merge=np.min)
Amax = member(
    NumberOfRow, "Amax", "the largest ``|x|`` (NaN if one is NaN)", piece=lambda x: np.absolute(x).max(), merge=np.max
)
Amin = member(
    NumberOfRow, "Amin", "the smallest ``|x|`` (NaN if one is NaN)", piece=lambda x: np.absolute(x).min(), merge=np.min
)
Asum = member(NumberOfRow, "Asum", "Σ ``|x|``", piece=lambda x: np.absolute(x).sum())
Nnz = member(NumberOfRow, "Nnz", "the count of numbers that are not 0 (NaN is not 0)", piece=np.count_nonzero)
Nrm2 = member(
    NumberOfRow, "Nrm2", "√Σx², a float,", piece=lambda x: np.square(x, dtype=np.float64).sum(), result=math.sqrt
)
