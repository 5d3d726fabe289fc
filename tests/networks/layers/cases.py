"""Every type of layer has a small graph around it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from networks.functions_by_name import LAYER_TYPES, LOSSES, TRANSFER_FUNCTIONS

from streamiter.networks.configuration import FunctionSettings, LayerConfiguration
from streamiter.networks.data import PlaceHolder
from streamiter.networks.functions import NetworkLoss
from streamiter.networks.layers import Layer, LossLayer
from streamiter.networks.network import LayerGraph
from streamiter.parameter_server.optimizers import SGD

__all__ = ["CASES", "FACTORS", "FIELDS", "Nodes", "graph_around"]

FIELDS, FACTORS = 4, 3
PAIRS = 6


@dataclass
class Nodes:
    """A list of layers, each after its inputs."""

    place_holder: PlaceHolder
    layers: list[Layer] = field(default_factory=list)

    def add(
        self, type_name: str, output_dim: int = -1, *inputs: Layer, transfer: str = "identity", **settings: Any
    ) -> Layer:
        """Add a layer whose name is its type and its number."""
        layer = LAYER_TYPES[type_name](
            LayerConfiguration(
                f"{type_name}{len(self.layers)}",
                type_name,
                output_dim,
                optimizer=SGD(0.1),
                transfer_function=FunctionSettings(transfer, make=TRANSFER_FUNCTIONS[transfer]),
                **settings,
            ),
            inputs,
            self.place_holder,
        )
        self.layers.append(layer)
        return layer

    def vectors(self) -> Layer:
        """Add an embedding."""
        return self.add("embedding", FIELDS * FACTORS, num_factors=FACTORS, vector_width=FACTORS)

    def hidden(self, output_dim: int) -> Layer:
        """Add a layer of any dimension, with all features as its input."""
        return self.add("simpleinputlayer", output_dim, transfer="tanh")

    def graph(self, last: Layer, loss: NetworkLoss | None = None, type_name: str = "losslayer") -> LayerGraph:
        """Return a graph of all layers with a loss; several outputs first pass a fully connected layer."""
        if loss is None and last.output_dim > 1:
            last = self.add("fclayer", 1, last)
        end = self.add(type_name, -1, last, loss=FunctionSettings("loss", make=lambda: loss or LOSSES["l2loss"]()))
        assert isinstance(end, LossLayer)
        return LayerGraph(self.layers, self.place_holder, end)


def _tiled(nodes: Nodes) -> Layer:
    return nodes.add("biinteractioncrosstiled", PAIRS * FACTORS, nodes.vectors())


def _cross(nodes: Nodes) -> Layer:
    vectors = nodes.vectors()
    once = nodes.add("crosslayer", FIELDS * FACTORS, vectors, vectors)
    return nodes.add("crosslayer", FIELDS * FACTORS, vectors, once)


def _shared(nodes: Nodes) -> Layer:
    inner = nodes.add("paramsharedfc", PAIRS * 2, _tiled(nodes), weight_dim=2, transfer="tanh")
    return nodes.add("paramsharedfc", PAIRS, inner, weight_dim=1, transfer="softmax")


def _weighted(nodes: Nodes) -> Layer:
    vectors = _tiled(nodes)
    weights = nodes.add("paramsharedfc", PAIRS, vectors, weight_dim=1, transfer="softmax")
    return nodes.add("weightedsumlayer", FACTORS, weights, vectors)


def _three(type_name: str, output_dim: int) -> Callable[[Nodes], Layer]:
    def build(nodes: Nodes) -> Layer:
        return nodes.add(type_name, output_dim, nodes.vectors(), nodes.hidden(12), nodes.hidden(12))

    return build


CASES: dict[str, Callable[[Nodes], Layer]] = {
    "simpleinputlayer": lambda nodes: nodes.add("simpleinputlayer", 3, transfer="sigmoid"),
    "embedding": lambda nodes: nodes.vectors(),
    "kmeansinputlayer": lambda nodes: nodes.add("kmeansinputlayer", 3),
    "fclayer": lambda nodes: nodes.add("fclayer", 5, nodes.vectors(), transfer="tanh"),
    "paramsharedfc": _shared,
    "biinnersumcross": lambda nodes: nodes.add("biinnersumcross", 1, nodes.vectors()),
    "biinnercross": lambda nodes: nodes.add("biinnercross", PAIRS, nodes.vectors()),
    "biinteractioncross": lambda nodes: nodes.add("biinteractioncross", FACTORS, nodes.vectors()),
    "biinteractioncrosstiled": _tiled,
    "bioutercross": lambda nodes: nodes.add("bioutercross", PAIRS * FACTORS**2, nodes.vectors()),
    "biouttercross": lambda nodes: nodes.add("biouttercross", PAIRS * FACTORS**2, nodes.vectors()),
    "concatlayer": _three("concatlayer", 36),
    "sumpooling": _three("sumpooling", 12),
    "mulpooling": _three("mulpooling", 12),
    "dotpooling": _three("dotpooling", 1),
    "crosslayer": _cross,
    "weightedsumlayer": _weighted,
    "simplelosslayer": lambda nodes: nodes.hidden(1),
    "losslayer": lambda nodes: nodes.hidden(1),
}
"""For each type, a function that adds one such layer and returns the last layer before the loss."""


def graph_around(type_name: str, place_holder: PlaceHolder) -> LayerGraph:
    """Return the graph of a case."""
    nodes = Nodes(place_holder)
    last = CASES[type_name](nodes)
    return nodes.graph(last, type_name=type_name if type_name.endswith("losslayer") else "losslayer")
