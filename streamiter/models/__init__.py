"""Models as records of a topic: a flow publishes an update after each step, and any program can follow them.

An update is one record. Its key is the model's name; its headers are ``model``, ``generation``, ``version``,
``created_at``, ``content_type`` and, if known, ``epoch``. Its value is a JSON document (``model``, ``generation``,
``version``, ``epoch``, ``records``, ``metrics``, ``parameters``) or, for large arrays, safetensors. An update that is
larger than a record of the topic is written in chunks. An update may be a change of the one before it: rows of arrays,
and values. The topic may be compacted.

Each module imports from the modules before it: ``documents`` (parameters, the value), ``update`` (headers, keys),
``chunks``, ``changes``, ``intake``, ``reader``, ``publisher``, ``shapes``, ``shape_scores``, ``embedding_scores``,
``explanations``, ``model_crosses``, ``ranking``, ``standardized_model``, ``linear_predictor``, ``versions``,
``differences``, ``served`` and ``rollbacks``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamiter.models.differences import (
        ModelDifference as ModelDifference,
        ScaleChange as ScaleChange,
        WeightChange as WeightChange,
        model_comparison as model_comparison,
        model_difference as model_difference,
    )
    from streamiter.models.documents import Parameters as Parameters, UpdateFormat as UpdateFormat
    from streamiter.models.intake import UpdateStatistics as UpdateStatistics
    from streamiter.models.linear_predictor import LinearPredictor as LinearPredictor
    from streamiter.models.publisher import (
        EncoderState as EncoderState,
        InitialModel as InitialModel,
        ModelPublisher as ModelPublisher,
        ModelUpdateEncoder as ModelUpdateEncoder,
        RunStart as RunStart,
        initial_model as initial_model,
        next_run as next_run,
    )
    from streamiter.models.ranking import Candidates as Candidates, RankedCandidate as RankedCandidate
    from streamiter.models.reader import (
        ModelUpdates as ModelUpdates,
        OnError as OnError,
        UpdateStart as UpdateStart,
        last_update as last_update,
        model_updates as model_updates,
    )
    from streamiter.models.rollbacks import (
        Rollbacks as Rollbacks,
        RollbackWatch as RollbackWatch,
        import_model as import_model,
        promote as promote,
    )
    from streamiter.models.served import (
        NoModel as NoModel,
        Prediction as Prediction,
        ServedModel as ServedModel,
        ServedModelStatistics as ServedModelStatistics,
    )
    from streamiter.models.update import (
        ChunkSet as ChunkSet,
        ModelSnapshot as ModelSnapshot,
        ModelUpdate as ModelUpdate,
    )
    from streamiter.models.versions import (
        ModelVersion as ModelVersion,
        NoSuchVersion as NoSuchVersion,
        exported as exported,
        find_update as find_update,
        model_names as model_names,
        model_versions as model_versions,
        read_model as read_model,
        roll_back as roll_back,
    )
else:
    from streamiter.values.helpers.lazy import lazy_names

    # What publishes is a step of the engine.
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "streamiter.models.differences": "ModelDifference ScaleChange WeightChange model_comparison "
            "model_difference",
            "streamiter.models.documents": "Parameters UpdateFormat",
            "streamiter.models.intake": "UpdateStatistics",
            "streamiter.models.linear_predictor": "LinearPredictor",
            "streamiter.models.publisher": "EncoderState InitialModel ModelPublisher ModelUpdateEncoder RunStart "
            "initial_model next_run",
            "streamiter.models.ranking": "Candidates RankedCandidate",
            "streamiter.models.reader": "ModelUpdates OnError UpdateStart last_update model_updates",
            "streamiter.models.rollbacks": "Rollbacks RollbackWatch import_model promote",
            "streamiter.models.served": "NoModel Prediction ServedModel ServedModelStatistics",
            "streamiter.models.update": "ChunkSet ModelSnapshot ModelUpdate",
            "streamiter.models.versions": "ModelVersion NoSuchVersion exported find_update model_names model_versions "
            "read_model roll_back",
        },
    )
