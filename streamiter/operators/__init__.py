"""Operators: what a step is and is given, and the built-in ones, one a file."""

from streamiter.operators.collect import Collect, Collected
from streamiter.operators.context import Context, JobScope, Progress
from streamiter.operators.filter import Filter
from streamiter.operators.filter_batch import FilterBatch
from streamiter.operators.flat_map import FlatMap
from streamiter.operators.functions import FunctionResultError
from streamiter.operators.identity import Identity
from streamiter.operators.join import Join
from streamiter.operators.keyed_reduce import KeyedReduce
from streamiter.operators.keyed_reduce_batch import KeyedReduceBatch
from streamiter.operators.keyed_state import KeyedState
from streamiter.operators.map import Map
from streamiter.operators.map_batch import MapBatch
from streamiter.operators.mini_batch import MiniBatch
from streamiter.operators.operator import (
    Boundary,
    BoundaryOutput,
    IterationListener,
    Operator,
    OperatorFactory,
)
from streamiter.operators.output import Output, Receiver
from streamiter.operators.reduce_all import ReduceAll
from streamiter.operators.rejection import DEAD_LETTERS, DeadLetter, Origin, RecordFailure, RejectionPolicy
from streamiter.operators.sort import Sort
from streamiter.operators.source import Positions, Source, SourceBatch, SourceFactory
from streamiter.operators.stateful_map import StatefulMap
from streamiter.operators.statistics import OperatorStatistics

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
