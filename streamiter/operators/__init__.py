"""Operators: what a step is and is given, and the built-in ones, one a file."""

from streamiter.operators.bounded import Join, ReduceAll, Sort
from streamiter.operators.keyed import KeyedReduce, KeyedReduceBatch, StatefulMap
from streamiter.operators.keyed_state import KeyedState
from streamiter.operators.mini_batch import MiniBatch
from streamiter.operators.operator import (
    Boundary,
    BoundaryOutput,
    Context,
    IterationListener,
    JobScope,
    Operator,
    OperatorFactory,
    OperatorStatistics,
    Progress,
)
from streamiter.operators.output import FunctionResultError, Output, Receiver
from streamiter.operators.rejection import DEAD_LETTERS, DeadLetter, Origin, RecordFailure, RejectionPolicy
from streamiter.operators.source import Collect, Collected, Positions, Source, SourceBatch, SourceFactory
from streamiter.operators.steps import Filter, FilterBatch, FlatMap, Identity, Map, MapBatch

__all__ = [
    "DEAD_LETTERS",
    "Boundary",
    "BoundaryOutput",
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
    "RecordFailure",
    "ReduceAll",
    "RejectionPolicy",
    "Sort",
    "Source",
    "SourceBatch",
    "SourceFactory",
    "StatefulMap",
]
