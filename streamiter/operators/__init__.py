"""Operators: the steps of a flow.

To write an operator of your own, read `operator` (the base class and its context) and `output` (where it emits). The
built-in operators follow: `steps` (without state), `keyed` and `keyed_state` (a state for each key), `holding` (records
held back), `source` (where records enter a flow). `functions` checks and calls the functions that users give to them.
"""

from streamiter.operators.calls import MapAsync
from streamiter.operators.functions import FunctionResultError
from streamiter.operators.holding import Join, MiniBatch, ReduceAll, Sort
from streamiter.operators.keyed import KeyedReduce, KeyedReduceBatch, StatefulMap
from streamiter.operators.keyed_state import KeyedState
from streamiter.operators.operator import (
    Context,
    IterationListener,
    JobScope,
    Operator,
    OperatorFactory,
    OperatorStatistics,
    Progress,
)
from streamiter.operators.output import DEAD_LETTERS, DeadLetter, Origin, Output, Receiver, RejectionPolicy
from streamiter.operators.source import Collect, Collected, Positions, Source, SourceBatch, SourceFactory
from streamiter.operators.steps import Filter, FilterBatch, FlatMap, Identity, Map, MapBatch

__all__ = [
    "DEAD_LETTERS",
    "Collect",
    "Collected",
    "Context",
    "DeadLetter",
    "Filter",
    "FilterBatch",
    "FlatMap",
    "FunctionResultError",
    "Identity",
    "IterationListener",
    "JobScope",
    "Join",
    "KeyedReduce",
    "KeyedReduceBatch",
    "KeyedState",
    "Map",
    "MapAsync",
    "MapBatch",
    "MiniBatch",
    "Operator",
    "OperatorFactory",
    "OperatorStatistics",
    "Origin",
    "Output",
    "Positions",
    "Progress",
    "Receiver",
    "ReduceAll",
    "RejectionPolicy",
    "Sort",
    "Source",
    "SourceBatch",
    "SourceFactory",
    "StatefulMap",
]
