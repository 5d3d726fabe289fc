"""The order of the layers: each behind its inputs, the loss layer last; and what is wrong with the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from streamiter.networks.configuration.layer_kinds import LAYER_KINDS
from streamiter.networks.configuration.settings import LayerConfiguration
from streamiter.networks.configuration.where import Where, nearest

__all__ = ["in_order"]


def in_order(layers: Sequence[LayerConfiguration], file: Where) -> tuple[LayerConfiguration, ...]:
    """As they are needed from the loss layer on, inputs first: the same whatever the order of the file."""
    by_name = {layer.name: layer for layer in layers}
    loss = _loss_layer(layers, file)
    _check_inputs(layers, by_name, file)
    ordered: dict[str, None] = {}
    _visit(loss, by_name, ordered, file)
    needed = tuple(ordered)
    for layer in layers:  # a cycle is told first, before that nothing leads from it to the loss layer
        _visit(layer, by_name, ordered, file)
    for layer in layers:
        if layer.name not in needed:
            raise file.layer(layer.name).error(
                f"expected a layer that leads to the loss layer {loss.name!r}, given one that does not; "
                "name it as an input of another layer, or remove it"
            )
    return tuple(by_name[name] for name in needed)


def _loss_layer(layers: Sequence[LayerConfiguration], file: Where) -> LayerConfiguration:
    found = [layer for layer in layers if LAYER_KINDS[layer.type].is_loss]
    if not found:
        given = ", ".join(f"{layer.name!r} ({layer.type})" for layer in layers) or "no layers"
        raise file.key("layers").error(
            f"expected a loss layer, of type 'simplelosslayer', given {given}; add one"
        )
    if len(found) > 1:
        names = ", ".join(repr(layer.name) for layer in found)
        raise file.layer(found[1].name).key("type").error(f"expected one loss layer, given {names}; keep one")
    return found[0]


def _check_inputs(
    layers: Sequence[LayerConfiguration], by_name: Mapping[str, LayerConfiguration], file: Where
) -> None:
    for layer in layers:
        for number, name in enumerate(layer.inputs):
            where = _place_of_input(layer, number, file)
            if name not in by_name:
                others = [other for other in by_name if other != layer.name]
                raise where.error(f"expected the name of a layer, given {name!r}{nearest(name, others)}")
            if LAYER_KINDS[by_name[name].type].is_loss:
                raise where.error(
                    f"expected a layer with an output, given {name!r}, a loss layer, which has none"
                )


def _visit(
    start: LayerConfiguration,
    by_name: Mapping[str, LayerConfiguration],
    ordered: dict[str, None],
    file: Where,
) -> None:
    """Add the layer behind all that it needs; a loop of its own, for a chain may be deeper than Python's stack."""
    way: dict[str, int] = {start.name: 0}  # from the start down, with the number of the input to go to next
    while way:
        name, next_input = next(reversed(way.items()))
        inputs = () if name in ordered else by_name[name].inputs
        if next_input == len(inputs):
            ordered[name] = None
            way.popitem()
            continue
        way[name] += 1
        wanted = inputs[next_input]
        if wanted in way:
            raise _cycle(list(way), wanted, by_name, file)
        if wanted not in ordered:
            way[wanted] = 0


def _cycle(
    way: list[str], closes_at: str, by_name: Mapping[str, LayerConfiguration], file: Where
) -> Exception:
    """The way of the data, which is against that of the search."""
    members = way[way.index(closes_at) :]
    data_way = [closes_at, *reversed(members)]
    first = by_name[members[-1]]
    where = _place_of_input(first, first.inputs.index(closes_at), file)
    return where.error(
        f"expected layers without a cycle, given {' → '.join(map(repr, data_way))}; take one of its inputs away"
    )


def _place_of_input(layer: LayerConfiguration, number: int, file: Where) -> Where:
    where = file.layer(layer.declared)
    if LAYER_KINDS[layer.type].inputs == "one":
        return where.key("inputlayer")
    return where.key("inputlayers").item(number)
