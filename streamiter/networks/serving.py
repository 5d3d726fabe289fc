"""Using a trained network: predictions, its quality on rows with labels, networks on disk, and networks from a topic.

``NetworkPredictor`` predicts with one set of parameters, ``evaluate`` compares predictions with labels,
``TrainedNetwork`` is the result of a training, ``save_network`` and ``load_network`` keep a network in a folder, and
``ServedNetwork`` always predicts with the newest published version. A version holds the parameters by name and the
network as canonical JSON; so a program that follows a model needs nothing else to predict.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from streamiter.errors import ConfigurationError, ModelError, StreamiterError
from streamiter.learn.quality.score_metrics import area_under_curve
from streamiter.learn.rows import holds
from streamiter.models.documents import STATE, Parameters
from streamiter.models.served import ServedModel
from streamiter.models.stored_rows import PartPath, StoredRows, belongs_on_disk
from streamiter.models.update import ModelUpdate
from streamiter.networks.data import LabelledRows
from streamiter.networks.functions import Predictions
from streamiter.networks.network import LayerGraph, Network
from streamiter.networks.sparse import FEATURES, checked_features, values_at
from streamiter.topics.topic import Topic
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.files import replace_file
from streamiter.values.numbers import Array
from streamiter.values.sparse_rows import SparseRows, rows_to_predict


class Diverged(ModelError):
    """A loss, a gradient or a parameter is no longer finite; the training ends.

    >>> print(Diverged("expected a finite loss, given inf").within("epoch 2"))
    epoch 2: expected a finite loss, given inf; lower lr, scale the features, or take another seed
    """

    trained: TrainedNetwork | None = None
    """Set by ``fit_network``: the network after the last epoch with finite numbers; None if there was none."""

    def __init__(self, what: str) -> None:
        self._what = what
        super().__init__(f"{what}; lower lr, scale the features, or take another seed")

    def within(self, place: str) -> Diverged:
        """Return the error with the place in the training where it happened."""
        return Diverged(f"{place}: {self._what}")


def finite_loss(graph: LayerGraph) -> float:
    """Return the mean loss of the current mini-batch. Raises :class:`Diverged` if it is not finite."""
    loss = graph.loss()
    if not math.isfinite(loss):
        raise Diverged(f"layer {graph.loss_layer.name!r}: expected a finite loss, given {loss}")
    return loss


def set_values(graph: LayerGraph, arrays: Mapping[str, Array]) -> None:
    """Set the parameters that the mini-batch of the graph needs."""
    holder = graph.place_holder
    needs_all = not holder.is_sparse or len(holder.indices) == holder.feature_dimension
    for parameter in graph.parameters:
        if parameter.by_feature and graph.drawn_as is not None:
            parameter.values = values_at(holder.indices, parameter, arrays, graph.drawn_as)
            continue
        whole = arrays[parameter.name]
        parameter.values = whole[holder.indices] if parameter.by_feature and not needs_all else whole


@final
class NetworkPredictor:
    """Predicts with one set of parameters.

    Rows are an array of shape (features,) or (rows, features), or a table with a column for each feature. A sparse row
    is the tuple ``(indices, values)``; many are a list of such tuples, or ``SparseRows``. A call returns for each row
    the probability of the positive class, or the predicted class of several, or else the score, which for a regression
    is the value itself.
    """

    def __init__(self, network: Network, arrays: Mapping[str, Array], subject: str = "network") -> None:
        self._subject = subject
        self._network = network
        self._graph = network.graph()
        self._arrays = arrays
        self._features = self._graph.place_holder.feature_dimension
        self._rows_at_once = network.configuration.train.batch_size

    def __call__(self, x: object) -> Any:
        rows, is_single = rows_to_predict(self._subject, x, self._features)
        parts = [_answer(part, self._graph) for part in self._parts(rows)]
        answers = np.concatenate(parts) if parts else np.zeros(0)
        return answers[0].item() if is_single else answers

    def __reduce__(self) -> tuple[Any, ...]:
        # Layers that have computed cannot be pickled.
        return type(self), (self._network, dict(self._arrays), self._subject)

    def predictions(self, x: object) -> Predictions:
        """Return score, probability and label of the rows, as far as the loss defines them."""
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


@dataclass(frozen=True)
class Evaluation:
    """The quality of a network on rows with labels.

    It has the mean loss; the share of rows that are predicted correctly (None for a regression); and the area under the
    ROC curve (None unless the rows have two classes).
    """

    rows: int
    loss: float
    accuracy: float | None
    auc: float | None

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the measures that are not None, by name."""
        named = {"loss": self.loss, "accuracy": self.accuracy, "auc": self.auc}
        return {prefix + name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class EpochResult:
    """The result of an epoch; ``training_loss`` is the mean over its mini-batches, each before its step."""

    epoch: int
    """The number of the epoch, from 1."""
    training_loss: float | None
    validation: Evaluation | None

    def describe(self) -> str:
        """Return the evaluation in one line.

        >>> EpochResult(2, 0.35, Evaluation(100, 0.341, 0.84, 0.9)).describe()
        'loss 0.3410, accuracy 0.8400, AUC 0.9000'
        """
        if self.validation is None:
            return "" if self.training_loss is None else f"training loss {self.training_loss:.4f}"
        named = {"loss": self.validation.loss, "accuracy": self.validation.accuracy, "AUC": self.validation.auc}
        return ", ".join(f"{name} {value:.4f}" for name, value in named.items() if value is not None)


# The rows that are evaluated at a time: with some hundred numbers a row they need 4 MB.
_ROWS_AT_ONCE: Final = 4096


def evaluate(graph: LayerGraph, arrays: Mapping[str, Array], data: LabelledRows) -> Evaluation:
    """Evaluate the parameters on the rows. Nothing else may use the graph meanwhile."""
    if not len(data):
        raise ModelError("evaluation: expected rows to evaluate, given none")
    loss_function = graph.loss_layer.loss
    loss, correct, scores = 0.0, 0, []
    is_classification = is_binary = False
    for first in range(0, len(data), _ROWS_AT_ONCE):
        some = data[first : first + _ROWS_AT_ONCE]
        graph.feed_data(some.rows, some.labels)
        set_values(graph, arrays)
        loss += finite_loss(graph) * len(some)
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


def evaluation_of(metrics: Mapping[str, float], prefix: str, rows: int) -> Evaluation | None:
    """Return the evaluation that ``Evaluation.metrics`` turned into metrics; None if there is none."""
    if f"{prefix}loss" not in metrics:
        return None
    loss, accuracy, auc = (metrics.get(prefix + name) for name in ("loss", "accuracy", "auc"))
    return Evaluation(rows, math.nan if loss is None else loss, accuracy, auc)


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """A network and its parameters by name after the last epoch."""

    network: Network
    parameters: dict[str, Array]
    results: list[EpochResult]
    """A result for each epoch; after an ``"interruption"`` the last epoch is incomplete."""
    ended_by: Literal["epochs", "interruption", "divergence"]

    def evaluate(self, data: LabelledRows) -> Evaluation:
        """Evaluate the network on rows with labels."""
        graph = self.network.graph()
        return evaluate(graph, self.parameters, data.widened(graph.place_holder.feature_dimension, "evaluation"))

    @property
    def predictor(self) -> NetworkPredictor:
        """Return a predictor with these parameters."""
        return NetworkPredictor(self.network, self.parameters)


NETWORK: Final = "network"
"""The name of the JSON among the arrays of a version. Each name of an array has a dot, this one has none."""


def version_of(network: Network, arrays: Mapping[str, Array]) -> dict[str, object]:
    """Return the parameters to publish: the arrays, and the network as JSON."""
    return {NETWORK: json.dumps(network.to_json()), **arrays}


def network_of_version(parameters: Parameters, subject: str) -> tuple[Network, dict[str, Array]]:
    """Return network and arrays of a version. Raises ModelError, beginning with ``subject``, for other parameters."""
    text = parameters.get(NETWORK) if isinstance(parameters, dict) else None
    if not isinstance(text, str):
        given = ", ".join(map(repr, parameters)) if isinstance(parameters, dict) else "an array"
        raise ModelError(f"{subject}: expected {NETWORK!r} with the arrays of a network, given {given}")
    assert isinstance(parameters, dict)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):  # A text would be read as the path of a file.
        raise ModelError(f"{subject}: expected {NETWORK!r} as a JSON object, given {text!r:.100}")
    network = Network.from_json(document)
    return network, checked_arrays(network, parameters, subject)


def checked_arrays(network: Network, given: Mapping[str, Any], subject: str) -> dict[str, Array]:
    """Return the parameters of the network from ``given``, in its dtype.

    Raises ModelError if an array is missing, has another shape or a number that is not finite, or if the network has no
    parameter of that name: then the arrays were trained in another network.
    """
    graph = network.graph()
    parameters, is_sparse = graph.parameters, graph.drawn_as is not None
    features = checked_features(given, graph.place_holder.feature_dimension, subject) if is_sparse else {}
    arrays: dict[str, Array] = {**features}
    others = given.keys() - {parameter.name for parameter in parameters} - {NETWORK, STATE, *features}
    if others:
        raise ModelError(
            f"{subject}: expected only arrays of the network, given {', '.join(sorted(map(repr, others)))}; "
            "load it with the network that it was trained as, or leave them out"
        )
    for parameter in parameters:
        array = given.get(parameter.name)
        is_stored = isinstance(array, StoredRows) and array.dtype == network.dtype
        expected = parameter.shape
        if is_sparse and parameter.by_feature:
            expected = len(features[FEATURES]), *expected[1:]
        if getattr(array, "shape", None) != expected:
            shape = "none" if array is None else f"shape {getattr(array, 'shape', None)}"
            raise ModelError(
                f"{subject}: expected {parameter.name!r} of shape {expected}, given {shape}; "
                "load it with the network that it was trained as"
            )
        found: Any = array if is_stored else _finite(parameter.name, array, network, subject)
        arrays[parameter.name] = found
    return arrays


def _finite(name: str, array: Any, network: Network, subject: str) -> Array:
    """Convert an array to the dtype of the network, in which a number of float64 may be too large."""
    with np.errstate(over="ignore"):
        numbers: Array | None = array.astype(network.dtype, copy=False) if array.dtype.kind in "biuf" else None
    if numbers is None or not holds(np.isfinite(numbers)):
        given = f"an array of {array.dtype}" if numbers is None else numbers[~np.isfinite(numbers)][0]
        raise ModelError(
            f"{subject}: expected {name!r} of finite numbers in {network.dtype}, given {given}; "
            "take another version of the model"
        )
    return numbers


_NETWORK: Final = "network.json"


_PARAMETERS: Final = "parameters.safetensors"


_RESULTS: Final = "results.json"


@dataclass(frozen=True, eq=False)
class SavedNetwork:
    """A network that was saved in a folder; it predicts, or its parameters are the ``start=`` of another training.

    ==========================  ==========================================================================
    ``network.json``            the network, its number of features included
    ``parameters.safetensors``  the parameters by name, which any safetensors library reads
    ``results.json``            the results of its epochs
    ==========================  ==========================================================================

    The state of the optimizers is not saved: training from a saved model starts with new slots, at step 1.
    """

    network: Network
    parameters: dict[str, Array]

    @property
    def predictor(self) -> NetworkPredictor:
        """Return a predictor with these parameters."""
        return NetworkPredictor(self.network, self.parameters)


def check_folder(directory: str | os.PathLike[str]) -> None:
    """Raise ModelError if a model cannot be saved: the folder holds something else, or cannot be written.

    Call this before the training, whose result would be lost otherwise.
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
        tempfile.TemporaryDirectory(dir=there).cleanup()  # Permissions do not tell: root has all of them.
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def save_network(
    directory: str | os.PathLike[str],
    network: Network,
    parameters: Mapping[str, Array],
    results: Sequence[EpochResult] = (),
) -> None:
    """Save a network in a folder, or replace the network that is saved there; each file is complete at any time.

    Raises ModelError if the folder holds something else or cannot be written, and if a parameter is missing, has
    another shape, or does not belong to the network.
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
            replace_file(folder / name, content)
    except OSError as error:
        raise _cannot_be_written(folder, error) from error


def load_network(directory: str | os.PathLike[str]) -> SavedNetwork:
    """Load the network that :func:`save_network` saved. Raises ModelError for a folder without a network."""
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
        raise ModelError(f"{subject}: expected parameters in {_PARAMETERS}, given a broken file: {error}") from error
    except KeyError as error:
        raise ModelError(
            f"{subject}: expected parameters in {_PARAMETERS} in float32 or float64, given numbers of type {error}, "
            "which numpy has not; convert them"
        ) from error
    return SavedNetwork(network, checked_arrays(network, arrays, subject))


def is_saved_network(folder: Path) -> bool:
    """Whether the folder holds a saved network."""
    return (folder / _NETWORK).is_file() and (folder / _PARAMETERS).is_file()


def _cannot_be_written(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"model {str(folder)!r}: expected a folder that can be written, given: {error.strerror}; save it elsewhere"
    )


def _as_json(document: object) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


@final
class ServedNetwork(ServedModel):
    """A network that follows its topic and predicts: a :class:`~streamiter.models.ServedModel` for networks.

    Each version contains all that a prediction needs.

    ::

        async with ServedNetwork(topic("kafka://127.0.0.1:9092/models"), "census") as served:
            await served.ready(timeout_s=10)
            print(served.predict(([3, 9, 18], [1.0, 1.0, 1.0])).value)

    Rows and values are as for :class:`~streamiter.networks.NetworkPredictor`. With ``folder``, the rows of the features
    of a sparse network are on disk, as for :class:`~streamiter.models.ServedModel`.
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        *,
        folder: str | os.PathLike[str] | None = None,
        waiting_max: int = 1024,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(topic, model, folder=folder, waiting_max=waiting_max, clock=clock)
        self._by_feature: tuple[object, dict[str, np.dtype[Any]]] = (None, {})
        """The JSON of the last network, and the types of its parameters by feature."""

    def _stored_parts(self, parameters: Parameters) -> list[PartPath]:
        if not isinstance(parameters, dict) or FEATURES not in parameters:
            return []
        if self._by_feature[0] != parameters.get(NETWORK):
            try:
                network, _ = network_of_version(parameters, "network")
            except StreamiterError:  # It is told where the version would predict.
                return []
            types = {each.name: network.dtype for each in network.graph().parameters if each.by_feature}
            self._by_feature = parameters[NETWORK], types
        return [(name,) for name, dtype in self._by_feature[1].items() if belongs_on_disk(parameters.get(name), dtype)]

    def _predictor(self, update: ModelUpdate) -> Callable[[Any], Any]:
        subject = self._subject_of(update)
        try:
            network, arrays = network_of_version(update.parameters, subject)
        except ConfigurationError as error:  # For example of a later release.
            raise ModelError(f"{subject}: expected a network, given {error}") from error
        return NetworkPredictor(network, arrays, subject)
