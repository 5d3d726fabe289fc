"""Whether what each layer gives fits what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamiter.networks.configuration.settings import DataSettings, LayerConfiguration
from streamiter.networks.configuration.where import Where

__all__ = ["check_dimensions"]


@dataclass(frozen=True, slots=True)
class _Graph:
    """What a check looks at beside the layer itself."""

    file: Where
    data: DataSettings
    layers: Mapping[str, LayerConfiguration]
    vector_widths: dict[str, int]
    """Of layers whose output is vectors one after the other, as of an embedding."""

    def inputs(self, layer: LayerConfiguration) -> list[LayerConfiguration]:
        return [self.layers[name] for name in layer.inputs]

    def key(self, layer: LayerConfiguration, key: str = "outputdim") -> Where:
        where = self.file.layer(layer.declared)
        if key == "outputdim" and layer.part is not None:
            return where.key("outputdims").item(layer.part)
        return where.key(key)

    def require(self, layer: LayerConfiguration, expected: int, because: str) -> None:
        """One output dimension and no other."""
        if layer.output_dim != expected:
            raise self.key(layer).error(
                f"expected {expected}, {because}, given {layer.output_dim}; change it, or its input"
            )

    def vectors(self, layer: LayerConfiguration) -> tuple[int, int]:
        """How many vectors the input has, and how wide they are."""
        (source,) = self.inputs(layer)
        width = self.vector_widths.get(source.name)
        if width is None:
            raise self.key(layer, "inputlayer").error(
                f"expected vectors, as an embedding gives them, given {source.name!r} ({source.type})"
            )
        count = source.output_dim // width
        if count < 2:
            raise self.key(layer, "inputlayer").error(
                f"expected at least 2 vectors to cross, given {count} of {source.name!r}"
            )
        return count, width


def check_dimensions(layers: Sequence[LayerConfiguration], data: DataSettings, file: Where) -> None:
    """ConfigurationError for the first layer, in order, that does not fit; it names both numbers."""
    graph = _Graph(file, data, {layer.name: layer for layer in layers}, {})
    for layer in layers:
        check = _CHECKS.get(layer.type)
        if check is not None:
            check(layer, graph)


# ---- inputs


def _embedding(layer: LayerConfiguration, graph: _Graph) -> None:
    factors, fields = layer.num_factors or 1, graph.data.num_field
    if fields > 0:
        graph.require(layer, fields * factors, f"{fields} fields (numfield) × {factors} factors (numfactors)")
    elif layer.output_dim % factors:
        raise graph.key(layer).error(
            f"expected fields × factors, a multiple of {factors} (numfactors), given {layer.output_dim}"
        )
    graph.vector_widths[layer.name] = factors


# ---- layers of one input


def _scalar_cross(layer: LayerConfiguration, graph: _Graph) -> None:
    graph.vectors(layer)
    graph.require(layer, 1, "the one number that it gives")


def _inner_cross(layer: LayerConfiguration, graph: _Graph) -> None:
    count, _ = graph.vectors(layer)
    graph.require(layer, count * (count - 1) // 2, f"one number for each pair of {count} vectors")


def _interaction_cross(layer: LayerConfiguration, graph: _Graph) -> None:
    _, width = graph.vectors(layer)
    graph.require(layer, width, "a vector as wide as those of its input")


def _interaction_cross_tiled(layer: LayerConfiguration, graph: _Graph) -> None:
    count, width = graph.vectors(layer)
    pairs = count * (count - 1) // 2
    graph.require(layer, pairs * width, f"{width} numbers for each of the {pairs} pairs of {count} vectors")
    graph.vector_widths[layer.name] = width


def _outer_cross(layer: LayerConfiguration, graph: _Graph) -> None:
    count, width = graph.vectors(layer)
    pairs = count * (count - 1) // 2
    because = f"{width} × {width} numbers for each of the {pairs} pairs of {count} vectors"
    graph.require(layer, pairs * width * width, because)


def _shared(layer: LayerConfiguration, graph: _Graph) -> None:
    """The same small layer for each vector: so many vectors come out as go in."""
    (source,), width = graph.inputs(layer), layer.weight_dim or 1
    count, rest = divmod(layer.output_dim, width)
    if rest:
        raise graph.key(layer).error(f"expected a multiple of {width} (weightdim), given {layer.output_dim}")
    known = graph.vector_widths.get(source.name)
    if known is not None:
        vectors = source.output_dim // known
        because = f"{width} (weightdim) for each of the {vectors} vectors of {source.name!r}"
        graph.require(layer, vectors * width, because)
    elif source.output_dim % count:
        raise graph.key(layer).error(
            f"expected as many times {width} (weightdim) as its input has vectors, given {layer.output_dim}, "
            f"{count} times, which do not divide the {source.output_dim} of {source.name!r}"
        )
    graph.vector_widths[layer.name] = width


# ---- layers of several inputs


def _concatenated(layer: LayerConfiguration, graph: _Graph) -> None:
    _inherit_width(layer, graph)
    dims = [source.output_dim for source in graph.inputs(layer)]
    graph.require(layer, sum(dims), f"the sum of its inputs ({' + '.join(map(str, dims))})")


def _inherit_width(layer: LayerConfiguration, graph: _Graph) -> None:
    """Vectors of one width, added up or side by side, are vectors of that width."""
    widths = {graph.vector_widths.get(name) for name in layer.inputs}
    width = widths.pop()
    if width is not None and not widths:
        graph.vector_widths[layer.name] = width


def _pooled(layer: LayerConfiguration, graph: _Graph) -> None:
    _inherit_width(layer, graph)
    _crossed(layer, graph)


def _crossed(layer: LayerConfiguration, graph: _Graph) -> None:
    for source in graph.inputs(layer):
        graph.require(layer, source.output_dim, f"the dimension of its input {source.name!r}")


def _dot(layer: LayerConfiguration, graph: _Graph) -> None:
    first, *others = graph.inputs(layer)
    for number, source in enumerate(others, 1):
        if source.output_dim != first.output_dim:
            raise (
                graph.file.layer(layer.name)
                .key("inputlayers")
                .item(number)
                .error(
                    f"expected the dimension of {first.name!r}, {first.output_dim}, "
                    f"given {source.name!r} with {source.output_dim}"
                )
            )
    graph.require(layer, 1, "the one number that it gives")


def _weighted_sum(layer: LayerConfiguration, graph: _Graph) -> None:
    weights, vectors = graph.inputs(layer)
    if weights.output_dim * layer.output_dim != vectors.output_dim:
        raise graph.key(layer).error(
            f"expected the width of {weights.output_dim} vectors, one for each weight of {weights.name!r}, "
            f"in the {vectors.output_dim} of {vectors.name!r}, given {layer.output_dim}"
        )


# ---- the loss


def _loss(layer: LayerConfiguration, graph: _Graph) -> None:
    (source,), loss = graph.inputs(layer), layer.loss
    assert loss is not None
    if loss.type == "SoftmaxLoss":
        if source.output_dim < 2:
            raise graph.key(layer, "inputlayer").error(
                f"expected a layer with an output for each class, 2 or more, for {loss.type}, "
                f"given {source.name!r} with {source.output_dim}"
            )
    elif loss.type not in _OF_ANY_WIDTH and source.output_dim != 1:
        raise graph.key(layer, "inputlayer").error(
            f"expected a layer with 1 output for {loss.type}, given {source.name!r} with {source.output_dim}"
        )


_OF_ANY_WIDTH: Final = frozenset({"KmeansLoss"})

_CHECKS: Final[Mapping[str, Callable[[LayerConfiguration, _Graph], None]]] = {
    "Embedding": _embedding,
    "ParamSharedFC": _shared,
    "BiInnerSumCross": _scalar_cross,
    "BiInnerCross": _inner_cross,
    "BiInteractionCross": _interaction_cross,
    "BiInteractionCrossTiled": _interaction_cross_tiled,
    "BiOuterCross": _outer_cross,
    "ConcatLayer": _concatenated,
    "SumPooling": _pooled,
    "MulPooling": _pooled,
    "DotPooling": _dot,
    "CrossLayer": _crossed,
    "WeightedSumLayer": _weighted_sum,
    "SimpleLossLayer": _loss,
    "LossLayer": _loss,
}
