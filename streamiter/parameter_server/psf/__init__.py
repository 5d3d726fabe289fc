"""Functions that run where the parameters are: ``client.update(psf.Axpy(…))``, ``client.aggregate(psf.Sum(…))``.

The first argument of all of them is the name of the matrix. How to write one: ``UpdateFunction`` and ``GetFunction``.

>>> import asyncio
>>> from streamiter.parameter_server import ParameterServer, psf
>>> async def main() -> float:
...     async with ParameterServer(shards=2) as server:
...         await server.create_matrix("w", rows=2, columns=3, init=[1.0, 2.0, 3.0])
...         await server.update(psf.Axpy("w", x=0, y=1, a=2.0))
...         return await server.aggregate(psf.Sum("w", row=1))
>>> asyncio.run(main())
18.0
"""

from streamiter.parameter_server.psf.aggregates import (
    Amax,
    Amin,
    Asum,
    Dot,
    Equal,
    Max,
    Min,
    Nnz,
    Nrm2,
    Size,
    Sum,
)
from streamiter.parameter_server.psf.arrays import (
    CompressUpdate,
    Increment,
    MaxA,
    MinA,
    Push,
    Put,
    SparsePush,
)
from streamiter.parameter_server.psf.binary import Add, Div, MaxV, MinV, Mul, Sub
from streamiter.parameter_server.psf.function import GetFunction, PartitionFunction, UpdateFunction
from streamiter.parameter_server.psf.indexed_maps import MapWithIndex, Zip2MapWithIndex, Zip3MapWithIndex
from streamiter.parameter_server.psf.maps import Map, Zip2Map, Zip3Map
from streamiter.parameter_server.psf.optimize import InitialSlots, Optimize
from streamiter.parameter_server.psf.pull import FullPull, Pull, PullSparse
from streamiter.parameter_server.psf.random_rows import (
    KaimingNormal,
    RandomNormal,
    RandomUniform,
    XavierNormal,
    XavierUniform,
)
from streamiter.parameter_server.psf.scalar import AddS, Axpy, DivS, MulS, Pow, Scale, SubS
from streamiter.parameter_server.psf.unary import (
    Abs,
    Ceil,
    Copy,
    Exp,
    Expm1,
    Floor,
    Log,
    Log1p,
    Log10,
    Round,
    Signum,
    Sqrt,
)
from streamiter.parameter_server.psf.whole_matrix import Diag, Eye, Fill, FullFill, Reset

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
