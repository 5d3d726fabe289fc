"""A network as its configuration file says it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.networks.building import build
from streamiter.networks.configuration import Configuration, as_text, canonical, read_configuration
from streamiter.networks.drawing import DrawingFormat, draw
from streamiter.networks.graph import Graph
from streamiter.networks.initial_values import initial_values
from streamiter.networks.parameters import Array
from streamiter.networks.summary import Summary, summary_of
from streamiter.numbers import whole_number

__all__ = ["ConfigurationWarning", "Network"]


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

    def graph(self, dtype: npt.DTypeLike | None = None, *, seed: int = 0) -> Graph:
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

    def summary(self, graph: Graph | None = None) -> Summary:
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
        return draw(self.configuration, self.summary(), format)

    def _checked(self, dtype: npt.DTypeLike | None) -> np.dtype[Any]:
        kind = self.dtype if dtype is None else np.dtype(dtype)
        if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ConfigurationError(f"Network: expected dtype float32 or float64, given {kind}")
        return kind

    def __repr__(self) -> str:
        layers = len(self.configuration.layers)
        return f"Network({self.configuration.source!r}, {layers} layers, {self.dtype})"
