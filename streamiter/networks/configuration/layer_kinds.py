"""The types of layers: the class of each type, its keys in a file, and the check that its dimension fits its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from streamiter.networks.layers.hidden import (
    BiInnerCross,
    BiInnerSumCross,
    BiInteractionCross,
    BiInteractionCrossTiled,
    BiOuterCross,
    ConcatLayer,
    CrossLayer,
    DotPooling,
    FCLayer,
    MulPooling,
    ParamSharedFC,
    SumPooling,
    WeightedSumLayer,
)
from streamiter.networks.layers.inputs import Embedding, KMeansInputLayer, SimpleInputLayer
from streamiter.networks.layers.layer import Layer, LossLayer
from streamiter.networks.settings import DataSettings, LayerConfiguration
from streamiter.values.settings import SettingsDocument, SettingsError, choice_of


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The graph around a layer, for the check of its output dimension."""

    document: SettingsDocument
    data: DataSettings
    layers: Mapping[str, LayerConfiguration]
    vector_widths: dict[str, int]
    """The width of vectors by the name of a layer whose output is vectors, such as an embedding."""

    def inputs(self, layer: LayerConfiguration) -> list[LayerConfiguration]:
        return [self.layers[name] for name in layer.inputs]

    def error(self, layer: LayerConfiguration, text: str, *below: str) -> SettingsError:
        """Return an error about a key of a layer, or about its output dimension."""
        if not below:
            below = ("outputdim",) if layer.part is None else ("outputdims", f"[{layer.part}]")
        return self.document.error(("layers", layer.declared, *below), text)

    def require(self, layer: LayerConfiguration, expected: int, because: str) -> None:
        """Raise ConfigurationError for another output dimension."""
        if layer.output_dim != expected:
            raise self.error(
                layer, f"expected {expected}, {because}, given {layer.output_dim}; change it, or its input"
            )

    def vectors(self, layer: LayerConfiguration) -> tuple[int, int]:
        """Return the number of vectors in the input, and their width."""
        (source,) = self.inputs(layer)
        width = self.vector_widths.get(source.name)
        if width is None:
            raise self.error(
                layer,
                f"expected vectors, such as an embedding gives, given {source.name!r} ({source.type})",
                "inputlayer",
            )
        count = source.output_dim // width
        if count < 2:
            raise self.error(
                layer, f"expected at least 2 vectors to cross, given {count} of {source.name!r}", "inputlayer"
            )
        return count, width


LayerCheck = Callable[[LayerConfiguration, LayerContext], None]
"""Raises ConfigurationError if the output dimension of a layer does not fit its inputs."""


# -- inputs


def _embedding(layer: LayerConfiguration, graph: LayerContext) -> None:
    factors, fields = layer.num_factors or 1, graph.data.num_field
    if fields > 0:
        graph.require(layer, fields * factors, f"{fields} fields (numfield) × {factors} factors (numfactors)")
    elif layer.output_dim % factors:
        raise graph.error(
            layer, f"expected fields × factors, a multiple of {factors} (numfactors), given {layer.output_dim}"
        )
    graph.vector_widths[layer.name] = factors


# -- layers with one input


def _cross(size: Callable[[int, int], int], because: str, *, gives_vectors: bool = False) -> LayerCheck:
    """Return the check of a layer that has ``size(pairs, width)`` outputs, of all pairs of vectors of its input."""

    def check(layer: LayerConfiguration, graph: LayerContext) -> None:
        count, width = graph.vectors(layer)
        pairs = count * (count - 1) // 2
        graph.require(layer, size(pairs, width), because.format(count=count, pairs=pairs, width=width))
        if gives_vectors:
            graph.vector_widths[layer.name] = width

    return check


def _shared(layer: LayerConfiguration, graph: LayerContext) -> None:
    """Check a layer that is applied to each vector: it has as many vectors as its input."""
    (source,), width = graph.inputs(layer), layer.weight_dim or 1
    count, rest = divmod(layer.output_dim, width)
    if rest:
        raise graph.error(layer, f"expected a multiple of {width} (weightdim), given {layer.output_dim}")
    known = graph.vector_widths.get(source.name)
    if known is not None:
        vectors = source.output_dim // known
        because = f"{width} (weightdim) for each of the {vectors} vectors of {source.name!r}"
        graph.require(layer, vectors * width, because)
    elif source.output_dim % count:
        raise graph.error(
            layer,
            f"expected as many times {width} (weightdim) as its input has vectors, given {layer.output_dim}, "
            f"{count} times, which do not divide the {source.output_dim} of {source.name!r}",
        )
    graph.vector_widths[layer.name] = width


# -- layers with several inputs


def _concatenated(layer: LayerConfiguration, graph: LayerContext) -> None:
    _inherit_width(layer, graph)
    dims = [source.output_dim for source in graph.inputs(layer)]
    graph.require(layer, sum(dims), f"the sum of its inputs ({' + '.join(map(str, dims))})")


def _inherit_width(layer: LayerConfiguration, graph: LayerContext) -> None:
    """Note that vectors of one width, added or side by side, are vectors of that width."""
    widths = {graph.vector_widths.get(name) for name in layer.inputs}
    width = widths.pop()
    if width is not None and not widths:
        graph.vector_widths[layer.name] = width


def _pooled(layer: LayerConfiguration, graph: LayerContext) -> None:
    _inherit_width(layer, graph)
    _crossed(layer, graph)


def _crossed(layer: LayerConfiguration, graph: LayerContext) -> None:
    for source in graph.inputs(layer):
        graph.require(layer, source.output_dim, f"the dimension of its input {source.name!r}")


def _dot(layer: LayerConfiguration, graph: LayerContext) -> None:
    first, *others = graph.inputs(layer)
    for number, source in enumerate(others, 1):
        if source.output_dim != first.output_dim:
            raise graph.error(
                layer,
                f"expected the dimension of {first.name!r}, {first.output_dim}, "
                f"given {source.name!r} with {source.output_dim}",
                "inputlayers",
                f"[{number}]",
            )
    graph.require(layer, 1, _ONE_NUMBER)


def _weighted_sum(layer: LayerConfiguration, graph: LayerContext) -> None:
    weights, vectors = graph.inputs(layer)
    known = graph.vector_widths.get(vectors.name, layer.output_dim)
    if weights.output_dim * layer.output_dim != vectors.output_dim or known != layer.output_dim:
        raise graph.error(
            layer,
            f"expected the width of {weights.output_dim} vectors, one for each weight of {weights.name!r}, "
            f"in the {vectors.output_dim} of {vectors.name!r}, given {layer.output_dim}",
        )


# -- the loss


def _loss(layer: LayerConfiguration, graph: LayerContext) -> None:
    (source,), loss = graph.inputs(layer), layer.loss
    assert loss is not None
    if loss.type == "SoftmaxLoss":
        if source.output_dim < 2:
            raise graph.error(
                layer,
                f"expected a layer with an output for each class, 2 or more, for {loss.type}, "
                f"given {source.name!r} with {source.output_dim}",
                "inputlayer",
            )
    elif loss.type != "KmeansLoss" and source.output_dim != 1:
        raise graph.error(
            layer,
            f"expected a layer with 1 output for {loss.type}, given {source.name!r} with {source.output_dim}",
            "inputlayer",
        )


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A type of layer: its class, its check, and the keys that it has in a file, apart from ``name`` and ``type``."""

    layer: type[Layer]
    check: LayerCheck | None = None
    inputs: Literal["none", "one", "many"] = "one"
    """``none``: the layer reads the mini-batch; ``one``: ``inputlayer``; ``many``: ``inputlayers``."""
    least_inputs: int = 1
    most_inputs: int | None = None
    folded: bool = False
    """Whether ``outputdims`` and ``transfuncs`` make several layers of it."""
    has_transfer_function: bool = False
    is_trainable: bool = False
    has_factors: bool = False
    has_weight_dims: bool = False
    default_dim: int | None = None
    """The output dimension if the file gives none; None: the file must give one."""
    is_loss: bool = False


_INPUT: Final = partial(LayerKind, inputs="none", is_trainable=True)
_FOLDED: Final = partial(LayerKind, folded=True, has_transfer_function=True, is_trainable=True)
_JOIN: Final = partial(LayerKind, inputs="many", least_inputs=2)
_ONE_NUMBER: Final = "the one number that it gives"
_LOSS: Final = LayerKind(LossLayer, _loss, is_loss=True)

LAYER_KINDS: Final[Mapping[str, LayerKind]] = {
    "SimpleInputLayer": _INPUT(SimpleInputLayer, has_transfer_function=True),
    "Embedding": _INPUT(Embedding, _embedding, has_factors=True),
    "KmeansInputLayer": _INPUT(KMeansInputLayer, has_transfer_function=True),
    "FCLayer": _FOLDED(FCLayer),
    "ParamSharedFC": _FOLDED(ParamSharedFC, _shared, has_weight_dims=True),
    "BiInnerSumCross": LayerKind(BiInnerSumCross, _cross(lambda pairs, width: 1, _ONE_NUMBER), default_dim=1),
    "BiInnerCross": LayerKind(
        BiInnerCross, _cross(lambda pairs, width: pairs, "one number for each pair of {count} vectors")
    ),
    "BiInteractionCross": LayerKind(
        BiInteractionCross, _cross(lambda pairs, width: width, "the width of the vectors of its input")
    ),
    "BiInteractionCrossTiled": LayerKind(
        BiInteractionCrossTiled,
        _cross(
            lambda pairs, width: pairs * width,
            "{width} numbers for each of the {pairs} pairs of {count} vectors",
            gives_vectors=True,
        ),
    ),
    "BiOuterCross": LayerKind(
        BiOuterCross,
        _cross(
            lambda pairs, width: pairs * width * width,
            "{width} × {width} numbers for each of the {pairs} pairs of {count} vectors",
        ),
    ),
    "ConcatLayer": LayerKind(ConcatLayer, _concatenated, inputs="many"),
    "SumPooling": _JOIN(SumPooling, _pooled),
    "MulPooling": _JOIN(MulPooling, _pooled),
    "DotPooling": _JOIN(DotPooling, _dot),
    "CrossLayer": _JOIN(CrossLayer, _crossed, most_inputs=2, is_trainable=True),
    "WeightedSumLayer": _JOIN(WeightedSumLayer, _weighted_sum, most_inputs=2),
    "SimpleLossLayer": _LOSS,
    "LossLayer": _LOSS,
}
"""The types of layers by their names in Angel's spelling."""

ALIASES: Final = {"biouttercross": "BiOuterCross"}
"""Other spellings of types, in lower case."""


def kind_of(value: Any) -> str:
    """Parse the name of a type, in any case or another spelling.

    >>> kind_of("bioutterCross")
    'BiOuterCross'
    """
    other = ALIASES.get(value.lower(), value) if isinstance(value, str) else value
    return str(_known_kind_of(other))


_known_kind_of: Final = choice_of(*LAYER_KINDS, any_case=True, noun="a type of layer")
