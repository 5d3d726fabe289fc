"""Predictions of a network with parameters at hand."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from streamiter.clock import Clock
from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn.validation import area_under_curve
from streamiter.models.served import ServedModel, rows_to_predict
from streamiter.models.update import ModelUpdate
from streamiter.networks.data import LabelledRows
from streamiter.networks.learner import checked_arrays, network_of_version
from streamiter.networks.losses import Predictions
from streamiter.networks.network import Network
from streamiter.networks.parameters import Array
from streamiter.sparse_rows import SparseRows
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.networks.graph import LayerGraph

__all__ = [
    "EpochResult",
    "Evaluation",
    "NetworkPredictor",
    "SavedNetwork",
    "ServedNetwork",
    "check_folder",
    "evaluate",
    "evaluation_of",
    "is_saved_network",
    "load_network",
    "save_network",
]


def set_values(graph: LayerGraph, arrays: Mapping[str, Array]) -> None:
    """Give the graph the parameters that its mini-batch needs."""
    holder = graph.place_holder
    needs_all = not holder.is_sparse or len(holder.indices) == holder.feature_dimension
    for parameter in graph.parameters:
        whole = arrays[parameter.name]
        parameter.values = whole[holder.indices] if parameter.by_feature and not needs_all else whole


@final
class NetworkPredictor:
    """Predicts with one set of parameters. Rows: an array of features, (rows, features) or a table with a column for
    each feature; a sparse row is the tuple ``(indices, values)``, many are a list of such tuples or ``SparseRows``.

    Called, it gives for each row the probability of the positive class; of several classes the one that is predicted;
    otherwise the score, which of a regression is the value itself.
    """

    def __init__(self, network: Network, arrays: Mapping[str, Array], subject: str = "network") -> None:
        self._subject = subject
        self._graph = network.graph()
        self._arrays = arrays
        self._features = self._graph.place_holder.feature_dimension
        self._rows_at_once = network.configuration.train.batch_size

    def __call__(self, x: object) -> Any:
        rows, is_single = rows_to_predict(self._subject, x, self._features)
        parts = [_answer(part, self._graph) for part in self._parts(rows)]
        answers = np.concatenate(parts) if parts else np.zeros(0)
        return answers[0].item() if is_single else answers

    def predictions(self, x: object) -> Predictions:
        """All that the loss function makes of the scores."""
        parts = list(self._parts(rows_to_predict(self._subject, x, self._features)[0]))
        if not parts:
            return Predictions(np.zeros(0))
        return Predictions(
            np.concatenate([part.value for part in parts]),
            _concatenated([part.probability for part in parts]),
            _concatenated([part.label for part in parts]),
        )

    def _parts(self, rows: SparseRows | Array) -> Iterator[Predictions]:
        for first in range(0, len(rows), self._rows_at_once):
            self._graph.feed_data(rows[first : first + self._rows_at_once])
            set_values(self._graph, self._arrays)
            yield self._graph.predictions()


def _answer(predictions: Predictions, graph: LayerGraph) -> Array:
    has_several_classes = graph.loss_layer.output_dim > 1
    if has_several_classes and predictions.label is not None:
        return predictions.label
    return predictions.value if predictions.probability is None else predictions.probability


def _concatenated(parts: list[Array | None]) -> Array | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None


# Rows at a time: some hundred numbers for each row are 4 MB then, whatever there is to judge by.
_ROWS_AT_ONCE: Final = 4096


@dataclass(frozen=True)
class Evaluation:
    """The mean loss; the share of rows that are predicted right (not of a regression); the area under the ROC curve
    (of two classes, where both are there).

    How good a network is on rows with labels.
    """

    rows: int
    loss: float
    accuracy: float | None
    auc: float | None

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Those that there are, by name."""
        named = {"loss": self.loss, "accuracy": self.accuracy, "auc": self.auc}
        return {prefix + name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class EpochResult:
    """How an epoch went: ``training_loss`` is the mean over its mini-batches, each before its step."""

    epoch: int
    """From 1 on."""
    training_loss: float | None
    validation: Evaluation | None

    def describe(self) -> str:
        """In a line.

        >>> EpochResult(2, 0.35, Evaluation(100, 0.341, 0.84, 0.9)).describe()
        'loss 0.3410, accuracy 0.8400, AUC 0.9000'
        """
        if self.validation is None:
            return "" if self.training_loss is None else f"training loss {self.training_loss:.4f}"
        named = {
            "loss": self.validation.loss,
            "accuracy": self.validation.accuracy,
            "AUC": self.validation.auc,
        }
        return ", ".join(f"{name} {value:.4f}" for name, value in named.items() if value is not None)


def evaluate(graph: LayerGraph, arrays: Mapping[str, Array], data: LabelledRows) -> Evaluation:
    """Of these parameters on these rows, in a graph that is used for nothing else meanwhile."""
    if not len(data):
        raise ModelError("evaluation: expected rows to judge by, given none")
    loss_function = graph.loss_layer.loss
    loss, correct, scores = 0.0, 0, []
    is_classification = is_binary = False
    for first in range(0, len(data), _ROWS_AT_ONCE):
        some = data[first : first + _ROWS_AT_ONCE]
        graph.feed_data(some.rows, some.labels)
        set_values(graph, arrays)
        loss += graph.loss() * len(some)
        predictions = graph.predictions()
        hits = loss_function.correct(predictions, some.labels)
        if hits is not None:
            is_classification, is_binary = True, graph.loss_layer.output_dim == 1
            correct += int(np.count_nonzero(hits))
            scores.append(predictions.value)
    auc = None
    if is_binary:
        targets = (data.labels > 0.0).astype(np.float64)
        auc = area_under_curve(np.concatenate(scores).astype(np.float64), targets, np.ones(len(data)))
    accuracy = correct / len(data) if is_classification else None
    return Evaluation(len(data), loss / len(data), accuracy, auc)


def evaluation_of(metrics: Mapping[str, Any], prefix: str, rows: int) -> Evaluation | None:
    """The other way round of ``Evaluation.metrics``; None where there are none."""
    if f"{prefix}loss" not in metrics:
        return None
    loss, accuracy, auc = (metrics.get(prefix + name) for name in ("loss", "accuracy", "auc"))
    return Evaluation(rows, math.nan if loss is None else loss, accuracy, auc)


_NETWORK: Final = "network.json"
_PARAMETERS: Final = "parameters.safetensors"
_RESULTS: Final = "results.json"


@dataclass(frozen=True, eq=False)
class SavedNetwork:
    """What a folder held: for prediction, or as ``start=`` of another training.

    Networks on disk: a folder with the canonical JSON and the parameters.

    =========================  ==========================================================================
    ``network.json``           the network, its number of features included
    ``parameters.safetensors`` the parameters by name, which any safetensors library reads
    ``results.json``           how its epochs went
    =========================  ==========================================================================

    What optimizers remember is not kept: training that goes on from a saved model begins with new slots, at step 1.
    """

    network: Network
    parameters: dict[str, Array]

    @property
    def predictor(self) -> NetworkPredictor:
        """Predicts with these parameters."""
        return NetworkPredictor(self.network, self.parameters)


def check_folder(directory: str | os.PathLike[str]) -> None:
    """Raise ModelError where a model cannot be saved, for something else is there, or nothing can be written.

    To be asked before it is trained: what was learned would be lost.
    """
    folder = Path(directory)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there == folder:
        fits = folder.is_dir() and (is_saved_network(folder) or not any(folder.iterdir()))
        given = "something else"
    else:
        fits, given = there.is_dir(), f"a path below {str(there)!r}, which is a file"
    if not fits:
        raise ModelError(
            f"model {str(folder)!r}: expected a new folder, an empty one, or one with {_NETWORK}, given {given}; "
            "save it elsewhere"
        )
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()  # Permissions tell less: root has all of them.
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def save_network(
    directory: str | os.PathLike[str],
    network: Network,
    parameters: Mapping[str, Array],
    results: Sequence[EpochResult] = (),
) -> None:
    """Write a folder, or replace what an earlier call wrote into it; each file is whole at any moment.

    Raises ModelError where something else is in the folder, where it cannot be written, and where a parameter is
    missing, of another shape, or none of the network's.
    """
    folder = Path(directory)
    arrays = checked_arrays(network, parameters, f"model {str(folder)!r}")
    check_folder(folder)
    files = {
        _RESULTS: _as_json([asdict(result) for result in results]),
        _NETWORK: _as_json(network.to_json()),
        _PARAMETERS: safetensors.numpy.save({name: array.copy() for name, array in arrays.items()}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _replace(folder / name, content)
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def load_network(directory: str | os.PathLike[str]) -> SavedNetwork:
    """What :func:`save_network` wrote. Raises ModelError for a folder that holds no such model."""
    folder = Path(directory)
    subject = f"model {str(folder)!r}"
    if not is_saved_network(folder):
        raise ModelError(
            f"{subject}: expected a folder with {_NETWORK} and {_PARAMETERS}, given "
            f"{'a folder without them' if folder.is_dir() else 'no folder'}; streamiter train --model makes one"
        )
    network = Network.from_json(folder / _NETWORK)
    try:
        arrays = safetensors.numpy.load((folder / _PARAMETERS).read_bytes())
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            f"{subject}: expected parameters in {_PARAMETERS}, given a broken file: {error}"
        ) from error
    except KeyError as error:
        raise ModelError(
            f"{subject}: expected parameters in {_PARAMETERS} in float32 or float64, given numbers of type {error}, "
            "which numpy has not; convert them"
        ) from error
    return SavedNetwork(network, checked_arrays(network, arrays, subject))


def is_saved_network(folder: Path) -> bool:
    """Whether a saved network is in it."""
    return (folder / _NETWORK).is_file() and (folder / _PARAMETERS).is_file()


def _cannot_be_written(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"model {str(folder)!r}: expected a folder that can be written, given: {error.strerror}; save it elsewhere"
    )


def _as_json(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@final
class ServedNetwork(ServedModel):
    """As :class:`~streamiter.models.ServedModel`, for networks: a version brings all that predictions take.

    ::

        async with ServedNetwork(topic("kafka://127.0.0.1:9092/models"), "census") as served:
            await served.ready(timeout_s=10)
            print(served.predict(([3, 9, 18], [1.0, 1.0, 1.0])).value)

    Rows and values are those of :class:`~streamiter.networks.NetworkPredictor`.

    A network that follows its topic and answers.
    """

    def __init__(
        self, topic: Topic, model: str, *, waiting_max: int = 1024, clock: Clock | None = None
    ) -> None:
        super().__init__(topic, model, waiting_max=waiting_max, clock=clock)

    def _predictor(self, update: ModelUpdate) -> Callable[[Any], Any]:
        subject = f"{self._subject}, update {update.generation}.{update.version}"
        try:
            network, arrays = network_of_version(update.parameters, subject)
        except ConfigurationError as error:  # Of a later release, say.
            raise ModelError(f"{subject}: expected a network, given {error}") from error
        return NetworkPredictor(network, arrays, subject)
