"""A network as its configuration file says it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.flow.drawing.formats import DrawingFormat, draw_picture
from streamiter.flow.drawing.picture import Link, Node, Picture
from streamiter.networks.configuration import Configuration, as_text, canonical, read_configuration
from streamiter.networks.configuration.settings import FunctionSettings, LayerConfiguration
from streamiter.networks.graph import LayerGraph
from streamiter.networks.layers import LAYER_TYPES, Layer, LossLayer
from streamiter.networks.layers.layer import LayerSettings
from streamiter.networks.losses import LOSSES, NetworkLoss
from streamiter.networks.mini_batches import PlaceHolder
from streamiter.networks.parameters import Array, Parameter, initial_values
from streamiter.networks.transfer_functions import TRANSFER_FUNCTIONS, TransferFunction
from streamiter.numbers import whole_number

__all__ = [
    "ConfigurationWarning",
    "Network",
    "NetworkSummary",
]


class ConfigurationWarning(UserWarning):
    """A configuration file has a key that nothing knows; it was left out."""


class Network:
    """Layers, settings of data and of training, from a file. It has no parameters itself: see ``initial_parameters``.

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
        """The network of a JSON file, or of what such a file says.

        Raises ConfigurationError that names the file, the layer and the key for whatever is wrong in it, before
        anything runs. Keys that are unknown are a :class:`ConfigurationWarning` each.
        """
        configuration = read_configuration(source)
        for text in configuration.warnings:
            warnings.warn(text, ConfigurationWarning, stacklevel=2)
        return cls(configuration)

    def to_json(self, path: str | PathLike[str] | None = None) -> dict[str, Any]:
        """The canonical form, which ``from_json`` makes the same network of; written to ``path``, too, if there is one.

        Two networks that are the same have the same canonical form, however their files were written.
        """
        document = canonical(self.configuration)
        if path is not None:
            Path(path).write_text(as_text(document), encoding="utf-8")
        return document

    # ---- what it works on

    @property
    def features(self) -> int | None:
        """How many the data has (``indexrange``, else ``modelsize``); None where only the data can say it."""
        return self.configuration.features

    def with_features(self, features: int) -> Network:
        """The same for data that has so many features."""
        count = whole_number("Network.with_features", features, 1)
        data = replace(self.configuration.data, index_range=count)
        return Network(replace(self.configuration, data=data))

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64, as ``modeltype`` says."""
        return np.dtype(self.configuration.model.dtype)

    # ---- what runs

    def graph(self, dtype: npt.DTypeLike | None = None, *, seed: int = 0) -> LayerGraph:
        """The layers, ready for mini-batches; ``dtype`` as ``modeltype`` says unless given.

        ``seed`` is where dropout draws from. ConfigurationError where the number of features is not known.
        """
        features = self.features
        if features is None:
            raise ConfigurationError(
                f"{self.configuration.source}: expected the number of features, given indexrange -1; "
                "set indexrange, or take network.with_features(…) with that of the data"
            )
        return build(self.configuration, features, self._checked(dtype), seed=seed)

    def initial_parameters(self, seed: int, dtype: npt.DTypeLike | None = None) -> dict[str, Array]:
        """What the parameters begin with, by name, as ``init`` says: "xavier", or "angel".

        Depends on ``seed`` and the names of the layers only: the same numbers in float32 as in float64, rounded.
        """
        graph, kind = self.graph(dtype), self._checked(dtype)
        way = self.configuration.model.init
        return {
            parameter.name: initial_values(parameter, seed=seed, way=way, dtype=kind)
            for parameter in graph.parameters
        }

    # ---- what is seen of it

    def summary(self, graph: LayerGraph | None = None) -> NetworkSummary:
        """A table to print: layers, inputs, shapes of outputs, parameters, status; of ``graph`` where it is given.

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
        """The graph as text: Mermaid or SVG; or as bytes: PNG, which takes the extra ``draw``."""
        picture = picture_of(self.configuration, self.summary())
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
    """Layers for the mini-batches of one worker; their parameters have no values yet.

    The graph of a configuration.
    """
    place_holder = PlaceHolder(features=features, dtype=dtype)
    layers: dict[str, Layer] = {}
    for layer in configuration.layers:
        inputs = [layers[name] for name in layer.inputs]
        try:
            layers[layer.name] = LAYER_TYPES[layer.key].from_settings(_settings(layer), inputs, place_holder)
        except ConfigurationError as error:
            raise ConfigurationError(f"{configuration.source}: {error}") from error
    loss_layer = layers[configuration.loss_layer.name]
    assert isinstance(loss_layer, LossLayer)
    return LayerGraph(list(layers.values()), place_holder, loss_layer, seed=seed)


def _settings(layer: LayerConfiguration) -> LayerSettings:
    settings = LayerSettings(
        name=layer.name,
        output_dim=layer.output_dim,
        optimizer=layer.optimizer,
        factors=layer.num_factors,
        weight_dim=layer.weight_dim,
    )
    if layer.transfer_function is not None:
        settings = replace(settings, transfer_function=_transfer_function(layer.transfer_function))
    if layer.loss is not None:
        settings = replace(settings, loss=_loss(layer.loss))
    return settings


def _transfer_function(settings: FunctionSettings) -> TransferFunction:
    return TRANSFER_FUNCTIONS[settings.key](**settings.parameters)


def _loss(settings: FunctionSettings) -> NetworkLoss:
    return LOSSES[settings.key](**settings.parameters)


_HEADINGS: Final = ("layer", "type", "inputs", "output", "parameters", "status")


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One layer."""

    layer: str
    type: str
    """With its transfer function, or its loss."""
    inputs: tuple[str, ...]
    output_dim: int
    """Numbers for each row."""
    parameters: int
    """Numbers it learns, without those for each feature where it is not known how many features there are."""
    parameters_per_feature: int
    """0 where the features are known."""
    status: str

    @property
    def cells(self) -> tuple[str, ...]:
        """As in the table."""
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
    """All layers, each behind its inputs; printed, it is a table.

    A network as a table.
    """

    title: str
    rows: tuple[SummaryRow, ...]

    headings = _HEADINGS

    @property
    def totals(self) -> str:
        """How much is learned in all."""
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


def summary_of(
    configuration: Configuration, graph: LayerGraph, *, features_are_known: bool
) -> NetworkSummary:
    """The table of a network whose layers are those of ``graph``."""
    by_name = {layer.name: layer for layer in graph.layers}
    rows = []
    for layer in configuration.layers:
        built = by_name[layer.name]
        numbers, per_feature = _sizes(built.parameters, features_are_known)
        rows.append(
            SummaryRow(
                layer.name,
                _described(layer),
                layer.inputs,
                built.output_dim,
                numbers,
                per_feature,
                str(built.status),
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
    """Numbers, and numbers for each feature where those are not counted."""
    if features_are_known:
        return sum(parameter.size for parameter in parameters), 0
    numbers = sum(parameter.size for parameter in parameters if not parameter.by_feature)
    per_feature = sum(
        parameter.size // parameter.shape[0] for parameter in parameters if parameter.by_feature
    )
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


def picture_of(configuration: Configuration, summary: NetworkSummary) -> Picture:
    """The mini-batch, then the layers; links say how many numbers of each row go along them."""
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
        nodes=(
            _mini_batch(configuration),
            *map(_layer, configuration.layers, summary.rows),
        ),
        links=tuple(links),
    )


def _mini_batch(configuration: Configuration) -> Node:
    data, features = configuration.data, configuration.features
    notes = [
        f"{data.format}, features from the data"
        if features is None
        else f"{data.format}, {features:,} features"
    ]
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
