"""The public names: what acceptance checks and users import."""

from __future__ import annotations

import importlib
import typing

import pytest

NAMES = {
    "streamiter": [
        "Columns",
        "FeedbackLimits",
        "Flow",
        "IterationBodyResult",
        "IterationConfig",
        "IterationListener",
        "Json",
        "Operator",
        "OutputTag",
        "Stream",
        "connect",
        "epochs_every",
        "iterate_unbounded_streams",
        "topic",
    ],
    "streamiter.learn": [
        "BadRows",
        "Constant",
        "DelayedLabels",
        "Examples",
        "FTRL",
        "FeatureHasher",
        "Gradient",
        "Inverse",
        "InverseSquareRoot",
        "LearningRate",
        "LinearModel",
        "LinearRegression",
        "LogisticRegression",
        "OnlineTraining",
        "Optimizer",
        "ProgressiveValidation",
        "SGD",
        "SparseRows",
        "train_online",
    ],
    "streamiter.models": [
        "ChunkSet",
        "EncoderState",
        "InitialModel",
        "LinearPredictor",
        "ModelPublisher",
        "ModelSnapshot",
        "ModelUpdate",
        "ModelUpdateEncoder",
        "ModelUpdates",
        "NoModel",
        "OnError",
        "Parameters",
        "Prediction",
        "RunStart",
        "ServedModel",
        "ServedModelStatistics",
        "UpdateFormat",
        "UpdateStart",
        "UpdateStatistics",
        "initial_model",
        "last_update",
        "model_updates",
        "next_generation",
        "next_run",
        "record_limit",
    ],
    "streamiter.operators": [
        "Boundary",
        "BoundaryOutput",
        "Collect",
        "Collected",
        "Context",
        "DEAD_LETTERS",
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
    ],
    "streamiter.testing": [
        "VirtualClock",
    ],
    "streamiter.topics": [
        "Connector",
        "Decoder",
        "Encoder",
        "Headers",
        "Json",
        "JsonColumns",
        "MemoryBroker",
        "MemoryConnector",
        "MemoryTopic",
        "OutgoingBatch",
        "Raw",
        "ReadRequest",
        "StartPosition",
        "StopPosition",
        "Text",
        "Topic",
        "TopicBatch",
        "TopicDescription",
        "TopicReader",
        "TopicRecord",
        "TopicWriter",
        "Transactions",
        "Typed",
        "WithMetadata",
        "connector_for",
        "topic",
    ],
}


@pytest.mark.parametrize(("room", "names"), NAMES.items())
def test_the_public_names_are_these_and_say_what_they_are_for(room: str, names: list[str]) -> None:
    """A name that disappears breaks whoever uses it; one that slips in must be kept for ever."""
    module = importlib.import_module(room)
    assert sorted(module.__all__) == names
    values = {name: getattr(module, name) for name in names}
    assert [name for name, value in values.items() if not _is_documented(value)] == []


def _is_documented(value: object) -> bool:
    # An alias of a type (a union, a Callable) has no place for a docstring of its own.
    return bool(value.__doc__) or typing.get_origin(value) is not None
