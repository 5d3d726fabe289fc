"""Models as records of a topic: published after every update, followed by whoever wants them.

An update is one record: its key is the model's name, its headers say ``model``, ``generation``, ``version``,
``created_at``, ``content_type`` and, if known, ``epoch``; its value is a JSON document (``model``,
``generation``, ``version``, ``epoch``, ``records``, ``metrics``, ``parameters``) or, for large arrays,
safetensors. An update above the topic's record limit is written in chunks. The topic may be compacted.
Layers, from below: parameters, update; tree, formats; headers, chunks; encoder; intake, tail; reader, last;
follower, served.
"""

from streamiter.models.formats import UpdateFormat
from streamiter.models.publisher import (
    EncoderState,
    InitialModel,
    ModelPublisher,
    ModelUpdateEncoder,
    initial_model,
    record_limit,
)
from streamiter.models.reader import (
    ModelUpdates,
    OnError,
    RunStart,
    UpdateStart,
    UpdateStatistics,
    last_update,
    model_updates,
    next_generation,
    next_run,
)
from streamiter.models.served import LinearPredictor, NoModel, Prediction, ServedModel, ServedModelStatistics
from streamiter.models.update import ChunkSet, ModelSnapshot, ModelUpdate, Parameters

__all__ = [
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
]
