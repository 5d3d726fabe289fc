"""Models as records of a topic: a flow publishes an update after each step, and any program can follow them.

An update is one record. Its key is the model's name; its headers are ``model``, ``generation``, ``version``,
``created_at``, ``content_type`` and, if known, ``epoch``. Its value is a JSON document (``model``, ``generation``,
``version``, ``epoch``, ``records``, ``metrics``, ``parameters``) or, for large arrays, safetensors. An update that is
larger than a record of the topic is written in chunks. An update may be a change of the one before it: rows of arrays,
and values. The topic may be compacted.

Each module imports from the modules before it: ``documents`` (parameters, the value), ``update`` (headers, keys),
``chunks``, ``stored_rows``, ``changes``, ``intake``, ``model_folder``, ``reader``, ``publisher``, ``shapes``,
``shape_scores``, ``published_embeddings``, ``embedding_scores``, ``explanations``, ``model_crosses``, ``ranking``,
``standardized_model``, ``vector_index``, ``catalogue``, ``linear_predictor``, ``versions``, ``differences``, ``served``
and ``rollbacks``.
"""

from typing import TYPE_CHECKING

from streamiter.models.documents import Parameters, UpdateFormat
from streamiter.models.intake import UpdateStatistics
from streamiter.models.reader import ModelUpdates, OnError, UpdateStart, last_update, model_updates
from streamiter.models.served import NoModel, Prediction, ServedModel, ServedModelStatistics
from streamiter.models.update import ChunkSet, ModelSnapshot, ModelUpdate

if TYPE_CHECKING:
    from streamiter.models.catalogue import ApproximateIndex, Catalogue
    from streamiter.models.differences import (
        ModelDifference,
        ScaleChange,
        WeightChange,
        model_comparison,
        model_difference,
    )
    from streamiter.models.linear_predictor import LinearPredictor
    from streamiter.models.publisher import (
        EncoderState,
        InitialModel,
        ModelPublisher,
        ModelUpdateEncoder,
        RunStart,
        initial_model,
        next_run,
    )
    from streamiter.models.ranking import Candidates, RankedCandidate
    from streamiter.models.rollbacks import Rollbacks, RollbackWatch, import_model, promote
    from streamiter.models.versions import (
        ModelVersion,
        NoSuchVersion,
        exported,
        find_update,
        model_names,
        model_versions,
        read_model,
        roll_back,
    )
else:
    from streamiter.values.helpers.lazy import lazy_names

    # What publishes is a step of the engine.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "streamiter.models.catalogue": "ApproximateIndex Catalogue",
            "streamiter.models.differences": "ModelDifference ScaleChange WeightChange model_comparison "
            "model_difference",
            "streamiter.models.linear_predictor": "LinearPredictor",
            "streamiter.models.publisher": "EncoderState InitialModel ModelPublisher ModelUpdateEncoder RunStart "
            "initial_model next_run",
            "streamiter.models.ranking": "Candidates RankedCandidate",
            "streamiter.models.rollbacks": "Rollbacks RollbackWatch import_model promote",
            "streamiter.models.versions": "ModelVersion NoSuchVersion exported find_update model_names model_versions "
            "read_model roll_back",
        },
    )

__all__ = [
    "ApproximateIndex",
    "Candidates",
    "Catalogue",
    "ChunkSet",
    "EncoderState",
    "InitialModel",
    "LinearPredictor",
    "ModelDifference",
    "ModelPublisher",
    "ModelSnapshot",
    "ModelUpdate",
    "ModelUpdateEncoder",
    "ModelUpdates",
    "ModelVersion",
    "NoModel",
    "NoSuchVersion",
    "OnError",
    "Parameters",
    "Prediction",
    "RankedCandidate",
    "RollbackWatch",
    "Rollbacks",
    "RunStart",
    "ScaleChange",
    "ServedModel",
    "ServedModelStatistics",
    "UpdateFormat",
    "UpdateStart",
    "UpdateStatistics",
    "WeightChange",
    "exported",
    "find_update",
    "import_model",
    "initial_model",
    "last_update",
    "model_comparison",
    "model_difference",
    "model_names",
    "model_updates",
    "model_versions",
    "next_run",
    "promote",
    "read_model",
    "roll_back",
]
