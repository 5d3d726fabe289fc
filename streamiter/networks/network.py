"""A network: the class ``Network`` for a configuration file, the layers that compute it, its summary and its picture.

``Network`` is the description. ``LayerGraph`` is what runs: the layers of one worker, which compute scores, loss and
gradients of a mini-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.flow.drawing.formats import DrawingFormat, draw_picture
from streamiter.flow.drawing.picture import Link, Node, Picture
from streamiter.learn.rows import BadRows
from streamiter.networks.configuration import Configuration, canonical, json_text, read_configuration
from streamiter.networks.configuration.layer_kinds import LAYER_KINDS
from streamiter.networks.data import PlaceHolder
from streamiter.networks.functions import Predictions
from streamiter.networks.layers.layer import Layer, LossLayer, Parameter, initial_values
from streamiter.networks.settings import LayerConfiguration
from streamiter.networks.sparse import no_features
from streamiter.values.numbers import Array, check_memory, whole_number
from streamiter.values.sparse_rows import SparseRows


class ConfigurationWarning(UserWarning):
    """A configuration file has an unknown key, which is ignored."""


class Network:
    """A network as its configuration file describes it: layers, and settings of data and training.

    It holds no parameters; ``initial_parameters`` makes some.

    >>> network = Network.from_json({
    ...     "data": {"format": "dummy", "indexrange": 148},
    ...     "default_optimizer": "momentum",
    ...     "layers": {
    ...         "wide": {"type": "simpleinputlayer", "outputdim": 1},
    ...         "loss": {"type": "simplelosslayer", "lossfunc": "logloss", "inputlayer": "wide"},
    ...     },
    ... })
    >>> {name: values.shape for name, values in network.initial_parameters(seed=1).items()}
    {'wide.weight': (148, 1), 'wide.bias': (1,)}
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    @classmethod
    def from_json(cls, source: str | PathLike[str] | Mapping[str, Any]) -> Self:
        """Return the network of a JSON file, or of the content of such a file.

        Raises ConfigurationError for any error in it, with the file, the layer and the key. Each unknown key is a
        :class:`ConfigurationWarning`.
        """
        configuration = read_configuration(source)
        for text in configuration.warnings:
            warnings.warn(text, ConfigurationWarning, stacklevel=2)
        return cls(configuration)

    def to_json(self, path: str | PathLike[str] | None = None) -> dict[str, Any]:
        """Return the canonical JSON of the network, and write it to ``path`` if given; ``from_json`` reads it.

        Equal networks have equal canonical JSON, also if their files differ.
        """
        document = canonical(self.configuration)
        if path is not None:
            Path(path).write_text(json_text(document), encoding="utf-8")
        return document

    # -- data

    @property
    def features(self) -> int | None:
        """Return the number of features (``indexrange``, else ``modelsize``); None if it depends on the data."""
        return self.configuration.features

    def with_features(self, features: int) -> Network:
        """Return the same network for data with this number of features."""
        count = whole_number("Network.with_features", features, 1)
        data = replace(self.configuration.data, index_range=count)
        return Network(replace(self.configuration, data=data))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return float32 or float64, as ``modeltype`` says."""
        return np.dtype(self.configuration.model.dtype)

    # -- computing

    def graph(self, dtype: npt.DTypeLike | None = None, *, seed: int = 0) -> LayerGraph:
        """Return the layers, ready for mini-batches; ``dtype`` None: as ``modeltype`` says.

        Dropout draws from ``seed``. Raises ConfigurationError if the number of features is not known.
        """
        features = self.features
        if features is None:
            raise ConfigurationError(
                f"{self.configuration.source}: expected the number of features, given indexrange -1; "
                "set indexrange, or take network.with_features(…) with the number in the data"
            )
        return build(self.configuration, features, self._checked(dtype), seed=seed)

    def initial_parameters(self, seed: int, dtype: npt.DTypeLike | None = None) -> dict[str, Array]:
        """Return the initial parameters by name, drawn as ``init`` says: "xavier" or "angel".

        They depend on ``seed`` and the names of the layers only; float32 has the numbers of float64, rounded. A network
        that stores only features that occur stores none yet: :mod:`streamiter.networks.sparse`.
        """
        graph, kind = self.graph(dtype), self._checked(dtype)
        check_size(graph)
        way = self.configuration.model.init
        if graph.drawn_as is None:
            return {made.name: initial_values(made, seed=seed, way=way, dtype=kind) for made in graph.parameters}
        whole = {
            made.name: initial_values(made, seed=seed, way=way, dtype=kind)
            for made in graph.parameters
            if not made.by_feature
        }
        no_rows = {made.name: np.empty((0, *made.shape[1:]), kind) for made in graph.parameters if made.by_feature}
        return {**no_features(whole_number("seed", seed, 0, 2**64 - 1)), **no_rows, **whole}

    # -- showing

    def summary(self, graph: LayerGraph | None = None) -> NetworkSummary:
        """Return a table of layers, inputs, shapes of outputs, parameters and status; ``graph`` has the status.

        >>> print(Network.from_json({"data": {"indexrange": 9}, "layers": [
        ...     {"name": "wide", "type": "simpleinputlayer", "outputdim": 1},
        ...     {"name": "loss", "type": "losslayer", "inputlayer": "wide"},
        ... ]}).summary())
        configuration: 9 features, float32
        <BLANKLINE>
        layer  type                        inputs      output     parameters  status
        ─────  ──────────────────────────  ──────────  ─────────  ──────────  ──────
        wide   SimpleInputLayer, Identity  mini-batch  (rows, 1)          10  Null
        loss   LossLayer, LogLoss          wide        (rows, 1)           0  Null
        ─────  ──────────────────────────  ──────────  ─────────  ──────────  ──────
        2 layers, 10 parameters
        """
        known = self.features is not None
        shown = (self if known else self.with_features(1)).graph() if graph is None else graph
        return summary_of(self.configuration, shown, features_are_known=known or graph is not None)

    @overload
    def draw(self, format: Literal["mermaid", "svg"] = "mermaid") -> str: ...

    @overload
    def draw(self, format: Literal["png"]) -> bytes: ...

    def draw(self, format: DrawingFormat = "mermaid") -> str | bytes:  # noqa: A002 (the word for it)
        """Draw the layers as text, Mermaid or SVG, or as bytes, PNG, which needs the extra ``draw``."""
        picture = network_picture(self.configuration, self.summary())
        return draw_picture(picture, format, f"network {self.configuration.source!r}")

    def _checked(self, dtype: npt.DTypeLike | None) -> np.dtype[Any]:
        kind = self.dtype if dtype is None else np.dtype(dtype)
        if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ConfigurationError(f"Network: expected dtype float32 or float64, given {kind}")
        return kind

    def __repr__(self) -> str:
        layers = len(self.configuration.layers)
        return f"Network({self.configuration.source!r}, {layers} layers, {self.dtype})"


def build(configuration: Configuration, features: int, dtype: npt.DTypeLike, *, seed: int) -> LayerGraph:
    """Return the layers of a configuration for one worker; their parameters have no values yet."""
    place_holder = PlaceHolder(features=features, dtype=dtype)
    layers: dict[str, Layer] = {}
    for layer in configuration.layers:
        inputs = [layers[name] for name in layer.inputs]
        layers[layer.name] = LAYER_KINDS[layer.type].layer(layer, inputs, place_holder)
    loss_layer = layers[configuration.loss_layer.name]
    assert isinstance(loss_layer, LossLayer)
    graph = LayerGraph(list(layers.values()), place_holder, loss_layer, seed=seed)
    by_feature = sum(parameter.size for parameter in graph.parameters if parameter.by_feature)
    if configuration.model.is_sparse and by_feature > _ARRAYS_MAX:
        graph.drawn_as = configuration.model.init
    return graph


# Up to this count of numbers arrays take 4 MB for each row of a matrix, and a step looks at all of them in 0.3 ms. The
# published networks, with 148 features, are 7 % faster with arrays.
_ARRAYS_MAX: Final = 1 << 20


def check_size(graph: LayerGraph) -> None:
    """Raise ModelError for parameters whose training does not fit into memory, before they take any."""
    stored = [parameter for parameter in graph.parameters if not (parameter.by_feature and graph.drawn_as)]
    # The rows are weights, slots and gradients. The weights are drawn, joined to rows, and put on the server.
    count = sum(parameter.size * (1 + 2 * (2 + len(parameter.optimizer.slot_names))) for parameter in stored)
    largest = max(stored, key=lambda parameter: parameter.size, default=None)
    if largest is not None:
        where = f"training of all parameters, of which {largest.name!r} is the largest"
        remedy = f"{'set modeltype to T_FLOAT_SPARSE, or ' if largest.by_feature else ''}lower indexrange"
        check_memory(where, count * graph.place_holder.dtype.itemsize, remedy, error=ModelError)


class LayerGraph:
    """The layers of one worker in topological order: each after its inputs, the loss layer last.

    A training step is: ``feed_data(rows, labels, training=True)``, set ``values`` of all ``parameters``, ``loss()``,
    ``backward()``, ``gradients()``, and after the optimizer's step ``update()``. Dropout draws from ``seed``.

    >>> configuration = read_configuration({"layers": [
    ...     {"type": "SimpleInputLayer", "name": "wide", "outputdim": 1},
    ...     {"type": "LossLayer", "name": "end", "inputlayer": "wide"},
    ... ]})
    >>> graph = build(configuration, features=2, dtype="float64", seed=0)
    >>> graph.feed_data([[1.0, 0.0], [1.0, 2.0]], [1, -1], training=True)
    >>> for parameter in graph.parameters:
    ...     parameter.values = np.zeros(graph.shape_of(parameter))
    >>> round(graph.loss(), 4)
    0.6931
    >>> graph.backward()
    >>> [(parameter.name, parameter.gradient.ravel().tolist()) for parameter in graph.gradients()]
    [('wide.weight', [0.0, 0.5]), ('wide.bias', [0.0])]
    """

    def __init__(
        self, layers: Sequence[Layer], place_holder: PlaceHolder, loss_layer: LossLayer, *, seed: int = 0
    ) -> None:
        self.layers = list(layers)
        self.place_holder = place_holder
        self.loss_layer = loss_layer
        self.parameters: list[Parameter] = [parameter for layer in self.layers for parameter in layer.parameters]
        self.drawn_as: str | None = None
        """How features that were not learned from are drawn; None: all features are in arrays."""
        self._seed = seed
        self._mini_batches = 0
        """The number of mini-batches that the network has learned from."""

    def feed_data(
        self,
        rows: SparseRows | npt.ArrayLike,
        labels: npt.ArrayLike | None = None,
        *,
        indices: npt.NDArray[np.int64] | None = None,
        training: bool = False,
        number: int | None = None,
    ) -> None:
        """Set the mini-batch; nothing is computed yet. ``PlaceHolder.feed_data`` describes the arguments.

        Dropout depends only on ``seed`` and ``number``, the number of the mini-batch; None: the graph counts the
        mini-batches for training. Raises ModelError for rows that do not fit, ``BadRows`` for labels that the loss does
        not know.
        """
        self.place_holder.feed_data(rows, labels, indices=indices, training=training)
        for position, layer in enumerate(self.layers):
            layer.reset()
            draws = training and layer.transfer is not None and layer.transfer.draws
            layer.generator = self._generator(position, number) if draws else None
        try:
            self.loss_layer.check_labels()
        except BadRows:
            self.place_holder.labels = None
            raise
        self._mini_batches += training

    def shape_of(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of ``values``: for a parameter by feature, one row for each feature of the mini-batch."""
        if parameter.by_feature:
            return (len(self.place_holder.indices), *parameter.shape[1:])
        return parameter.shape

    def forward(self) -> Array:
        """Compute the scores: (rows, outputs)."""
        self._check_values()
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self.layers:
                layer.cal_output()
        return self.loss_layer.output

    def loss(self) -> float:
        """Return the mean loss of the batch; compute the scores if necessary. It is not finite after a divergence."""
        self._forward_unless_done()
        return self.loss_layer.mean_loss()

    def predictions(self) -> Predictions:
        """Return the predictions; compute the scores if necessary."""
        self._forward_unless_done()
        return self.loss_layer.predictions()

    def backward(self) -> None:
        """Compute the gradients of all inputs. Raises ModelError if the mini-batch was fed for prediction."""
        if not self.place_holder.training:
            raise ModelError(
                "LayerGraph.backward: expected a mini-batch to learn from, given one for prediction; "
                "feed_data(rows, labels, training=True)"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in reversed(self.layers):
                layer.cal_backward()

    def gradients(self) -> list[Parameter]:
        """Compute the gradients of the parameters, and return all parameters."""
        with np.errstate(over="ignore", invalid="ignore"):
            for layer in self.layers:
                layer.cal_gradients()
        return self.parameters

    def update(self) -> None:
        """Tell the layers that the optimizer has made its step."""
        for layer in self.layers:
            layer.update()

    def _forward_unless_done(self) -> None:
        if self.loss_layer.status == 0:
            self.forward()

    def _generator(self, layer: int, number: int | None) -> np.random.Generator:
        return np.random.default_rng([self._seed, layer, self._mini_batches if number is None else number])

    def _check_values(self) -> None:
        for parameter in self.parameters:
            values, expected = parameter.values, self.shape_of(parameter)
            if values is not None and values.shape == expected and values.dtype == self.place_holder.dtype:
                continue
            given = "none" if values is None else f"{values.dtype} of shape {values.shape}"
            raise ModelError(
                f"parameter {parameter.name!r}: expected values of shape {expected} in {self.place_holder.dtype}, "
                f"given {given}; set the values for this mini-batch"
            )


_HEADINGS: Final = ("layer", "type", "inputs", "output", "parameters", "status")


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A layer in the summary."""

    layer: str
    type: str
    """The type, with the transfer function or the loss."""
    inputs: tuple[str, ...]
    output_dim: int
    """The number of outputs for each row."""
    parameters: int
    """The number of parameters; without those for each feature if the number of features is not known."""
    parameters_per_feature: int
    """The number of parameters for each feature; 0 if the number of features is known."""
    status: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row."""
        return (
            self.layer,
            self.type,
            ", ".join(self.inputs) or "mini-batch",
            f"(rows, {self.output_dim})",
            _count(self.parameters, self.parameters_per_feature),
            self.status,
        )


@dataclass(frozen=True)
class NetworkSummary:
    """A network as a table with a row for each layer, which comes after its inputs."""

    title: str
    rows: tuple[SummaryRow, ...]

    headings = _HEADINGS

    @property
    def totals(self) -> str:
        """Return the number of layers and parameters as text."""
        parameters = sum(row.parameters for row in self.rows)
        per_feature = sum(row.parameters_per_feature for row in self.rows)
        return f"{len(self.rows)} layers, {_count(parameters, per_feature)} parameters"

    def __str__(self) -> str:
        lines = [self.headings, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head, *body = (_line(cells, widths) for cells in lines)
        rule = "  ".join("─" * width for width in widths)
        return "\n".join([self.title, "", head, rule, *body, rule, self.totals])

    __repr__ = __str__


def summary_of(configuration: Configuration, graph: LayerGraph, *, features_are_known: bool) -> NetworkSummary:
    """Return the summary of a network with the layers of ``graph``."""
    by_name = {layer.name: layer for layer in graph.layers}
    rows = []
    for layer in configuration.layers:
        built = by_name[layer.name]
        numbers, per_feature = _sizes(built.parameters, features_are_known)
        rows.append(
            SummaryRow(
                layer.name, _described(layer), layer.inputs, built.output_dim, numbers, per_feature, str(built.status)
            )
        )
    features = graph.place_holder.feature_dimension if features_are_known else None
    return NetworkSummary(_title(configuration, features), tuple(rows))


def _title(configuration: Configuration, features: int | None) -> str:
    data = configuration.data
    parts = ["features from the data" if features is None else f"{features:,} features"]
    if data.num_field > 0:
        parts.append(f"{data.num_field:,} fields")
    return f"{configuration.source}: {', '.join((*parts, configuration.model.dtype))}"


def _described(layer: LayerConfiguration) -> str:
    function = layer.transfer_function or layer.loss
    return layer.type if function is None else f"{layer.type}, {function}"


def _sizes(parameters: Sequence[Parameter], features_are_known: bool) -> tuple[int, int]:
    """Return the number of parameters, and the number for each feature if features are not known."""
    if features_are_known:
        return sum(parameter.size for parameter in parameters), 0
    numbers = sum(parameter.size for parameter in parameters if not parameter.by_feature)
    per_feature = sum(parameter.size // parameter.shape[0] for parameter in parameters if parameter.by_feature)
    return numbers, per_feature


def _count(numbers: int, per_feature: int) -> str:
    if not per_feature:
        return f"{numbers:,}"
    by_feature = "features" if per_feature == 1 else f"{per_feature:,} × features"
    return f"{by_feature} + {numbers:,}" if numbers else by_feature


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(_padded(cells, widths)).rstrip()


def _padded(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for heading, cell, width in zip(_HEADINGS, cells, widths, strict=True):
        yield cell.rjust(width) if heading == "parameters" else cell.ljust(width)


def network_picture(configuration: Configuration, summary: NetworkSummary) -> Picture:
    """Return the picture: the mini-batch, then the layers; a link shows the number of values for each row."""
    numbers = {row.layer: number for number, row in enumerate(summary.rows, 1)}
    links = []
    for row in summary.rows:
        for name in row.inputs:
            dim = summary.rows[numbers[name] - 1].output_dim
            links.append(Link(numbers[name], numbers[row.layer], label=f"{dim:,}"))
        if not row.inputs:
            links.append(Link(0, numbers[row.layer]))
    return Picture(
        title=configuration.source,
        nodes=(_mini_batch(configuration), *map(_layer, configuration.layers, summary.rows)),
        links=tuple(links),
    )


def _mini_batch(configuration: Configuration) -> Node:
    data, features = configuration.data, configuration.features
    notes = [f"{data.format}, features from the data" if features is None else f"{data.format}, {features:,} features"]
    if data.num_field > 0:
        notes.append(f"{data.num_field:,} fields")
    return Node("mini-batch", "source", notes=tuple(notes))


def _layer(layer: LayerConfiguration, row: SummaryRow) -> Node:
    notes = [row.type] if layer.num_factors is None else [f"{row.type}, {layer.num_factors} factors"]
    if row.parameters or row.parameters_per_feature:
        notes.append(f"{row.cells[4]} parameters")
    if layer.optimizer_settings is not None:
        notes.append(str(layer.optimizer_settings))
    return Node(layer.name, "operator" if layer.loss is None else "sink", notes=tuple(notes))
