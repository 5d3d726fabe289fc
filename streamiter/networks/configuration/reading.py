"""Reads a configuration file, checks it completely, and writes a configuration as canonical JSON.

The checks: the file is JSON with known keys, the layers form a graph without a cycle that ends in one loss layer, and
the dimensions of all layers fit. Each error names the file, the layer and the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Final, NoReturn

from streamiter.errors import ConfigurationError
from streamiter.networks.configuration.layer_kinds import LAYER_KINDS, LayerContext
from streamiter.networks.configuration.sections import (
    LOSSES,
    OPTIMIZERS,
    REGULARIZATION,
    TRANSFER_FUNCTIONS,
    Defaults,
    FunctionKinds,
    LayerReader,
    read_function,
)
from streamiter.networks.settings import (
    Configuration,
    DataSettings,
    FunctionSettings,
    Keys,
    LayerConfiguration,
    ModelSettings,
    TrainSettings,
    Where,
    read_section,
    similar_names,
)

_PROBABILITIES: Final = ("Sigmoid", "SigmoidWithDropout", "Softmax")


def likely_mistakes(layers: Sequence[LayerConfiguration], file: Where) -> list[str]:
    """Return a warning for a cross entropy of values that may be outside of 0 to 1: its loss falls without bound."""
    by_name = {layer.name: layer for layer in layers}
    return [
        f"{file.layer(layer.declared).key('inputlayer')}: expected probabilities for {layer.loss.type}, given "
        f"{source.name!r}, which ends with {source.transfer_function.type}; end it with Sigmoid, or take LogLoss"
        for layer in layers
        if layer.loss is not None and layer.loss.type == "CrossEntropyLoss"
        for source in map(by_name.__getitem__, layer.inputs)
        if source.transfer_function is not None and source.transfer_function.type not in _PROBABILITIES
    ]


_OF_A_MAPPING = "configuration"


def read_source(source: str | PathLike[str] | Mapping[str, object]) -> tuple[Mapping[str, object], Where]:
    """Read a JSON file, or take its content; return the top object, and the place of the file for messages."""
    if isinstance(source, Mapping):
        return source, Where(_OF_A_MAPPING)
    if not isinstance(source, (str, PathLike)):
        raise ConfigurationError(
            f"{_OF_A_MAPPING}: expected the path of a JSON file, or a dict with its content, "
            f"given {type(source).__name__}"
        )
    path = Path(source)
    where = Where(path.name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path}: expected a JSON file, given {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise where.error(f"expected JSON in UTF-8, given a wrong byte at {error.start}") from error
    document = _parsed(text, where)
    if not isinstance(document, dict):
        raise where.wrong_kind("a JSON object", document)
    return document, where


def _parsed(text: str, where: Where) -> object:
    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        """Return the object. Python's JSON would silently keep the last of two layers with one name."""
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise where.error(f"expected each key of an object once, given {twice!r} twice; rename or remove one")
        return found

    def no_number(constant: str) -> NoReturn:
        raise where.error(f"expected JSON, given {constant}, which is no number of JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    except json.JSONDecodeError as error:
        raise where.error(
            f"expected JSON, given something else in line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise where.error(f"expected numbers that can be read, given one that cannot: {error}") from error
    except RecursionError as error:
        raise where.error("expected JSON, given objects nested too deep to be read") from error


def layers_in_order(layers: Sequence[LayerConfiguration], file: Where) -> tuple[LayerConfiguration, ...]:
    """Return the layers, each after its inputs, the loss layer last. Raises ConfigurationError for a bad graph.

    The order follows from the graph alone; it does not depend on the order in the file.
    """
    by_name = {layer.name: layer for layer in layers}
    loss = _loss_layer(layers, file)
    _check_inputs(layers, by_name, file)
    ordered: dict[str, None] = {}
    _visit(loss, by_name, ordered, file)
    needed = tuple(ordered)
    for layer in layers:  # a cycle is reported first, not that it does not lead to the loss layer
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
        raise file.key("layers").error(f"expected a loss layer, of type 'simplelosslayer', given {given}; add one")
    if len(found) > 1:
        names = ", ".join(repr(layer.name) for layer in found)
        raise file.layer(found[1].name).key("type").error(f"expected one loss layer, given {names}; keep one")
    return found[0]


def _check_inputs(layers: Sequence[LayerConfiguration], by_name: Mapping[str, LayerConfiguration], file: Where) -> None:
    for layer in layers:
        for number, name in enumerate(layer.inputs):
            where = _place_of_input(layer, number, file)
            if name not in by_name:
                others = [other for other in by_name if other != layer.name]
                raise where.error(f"expected the name of a layer, given {name!r}{similar_names(name, others)}")
            if LAYER_KINDS[by_name[name].type].is_loss:
                raise where.error(f"expected a layer with an output, given {name!r}, a loss layer, which has none")


def _visit(
    start: LayerConfiguration, by_name: Mapping[str, LayerConfiguration], ordered: dict[str, None], file: Where
) -> None:
    """Add the layer after its inputs; not recursive, because a chain may be deeper than Python's stack."""
    way: dict[str, int] = {start.name: 0}  # the layers on the way, each with the number of its next input
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


def _cycle(way: list[str], closes_at: str, by_name: Mapping[str, LayerConfiguration], file: Where) -> Exception:
    """Return the error about a cycle, in the direction of the data, opposite to the search."""
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


def with_vector_widths(
    layers: Sequence[LayerConfiguration], data: DataSettings, file: Where
) -> tuple[LayerConfiguration, ...]:
    """Return the layers with the widths of their vectors.

    Raises ConfigurationError for the first layer whose output dimension does not fit its inputs.
    """
    graph = LayerContext(file, data, {layer.name: layer for layer in layers}, {})
    for layer in layers:
        if check := LAYER_KINDS[layer.type].check:
            check(layer, graph)
    return tuple(replace(layer, vector_width=graph.vector_widths.get(layer.name)) for layer in layers)


# Older files of Angel misspell this key.
_DEFAULTS: Final[Mapping[str, tuple[FunctionKinds, str, tuple[str, ...]]]] = {
    "default_optimizer": (OPTIMIZERS, "Momentum", ()),
    "default_transfunc": (TRANSFER_FUNCTIONS, "Identity", ("default_trandfunc",)),
    "default_lossfunc": (LOSSES, "LogLoss", ()),
}


def read_configuration(source: str | PathLike[str] | Mapping[str, object]) -> Configuration:
    """Read the configuration of a network from a JSON file, or from the content of one.

    Raises ConfigurationError for the first error, with the file, the layer and the key. Unknown keys and likely
    mistakes are ``warnings`` of the result.

    >>> configuration = read_configuration({"layers": [
    ...     {"type": "SimpleLossLayer", "name": "loss", "inputlayer": "wide"},
    ...     {"type": "SimpleInputLayer", "name": "wide", "outputdim": 1},
    ... ]})
    >>> [layer.name for layer in configuration.layers], configuration.train.epoch
    (['wide', 'loss'], 30)
    """
    document, file = read_source(source)
    keys = Keys(document, file)
    warnings: list[str] = []

    data = read_section(DataSettings, keys.raw("data", {}), file.section("data"), warnings)
    model = read_section(ModelSettings, keys.raw("model", {}), file.section("model"), warnings)
    train = read_section(TrainSettings, keys.raw("train", {}), file.section("train"), warnings)
    defaults = Defaults(*(_default(keys, key, *kind, warnings) for key, kind in _DEFAULTS.items()))
    if "layers" not in keys:
        raise file.error(f"expected the key 'layers', given {keys.listed()}; add it")
    layers = layers_in_order(LayerReader(file, defaults, train, warnings).read(keys.raw("layers")), file)
    layers = with_vector_widths(layers, data, file)
    return Configuration(
        source=file.file,
        data=data,
        model=model,
        train=train,
        layers=layers,
        warnings=(*keys.unknown(), *warnings, *likely_mistakes(layers, file)),
    )


def _default(
    keys: Keys, key: str, kinds: FunctionKinds, unsaid: str, older: tuple[str, ...], warnings: list[str]
) -> FunctionSettings:
    spelled = [name for name in (key, *older) if name in keys]
    if len(spelled) > 1:
        raise keys.place(spelled[1]).error(f"expected it once, given {key!r} too; keep {key!r}")
    if not spelled:
        return read_function(unsaid, kinds, keys.where.key(key), warnings)
    return read_function(keys.raw(spelled[0]), kinds, keys.place(spelled[0]), warnings)


def canonical(configuration: Configuration) -> dict[str, object]:
    """Return the canonical JSON of a configuration: defaults filled in, types in Angel's spelling, layers in order.

    Angel saves this with a model. Reading it gives an equal configuration. Files have the same canonical JSON if they
    differ only in the order of layers, in case, in defaults, or in functions as names or objects.
    """
    return {
        "data": _section(configuration.data),
        "model": _section(configuration.model),
        "train": _section(configuration.train),
        "layers": _layers(configuration.layers),
    }


def json_text(document: Mapping[str, object]) -> str:
    """Return JSON with indentation."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _section(settings: DataSettings | ModelSettings | TrainSettings) -> dict[str, object]:
    """Return the settings by their keys, without those that have no effect: so a file of Angel stays the same."""
    names = sorted((field.name for field in fields(settings)), key=lambda name: name != "path")  # The path is first.
    document = {name.replace("_", ""): getattr(settings, name) for name in names}
    said = {key: value for key, value in document.items() if value is not None}
    if said.get("init") == "xavier":
        del said["init"]
    return {"blockSize" if key == "blocksize" else key: value for key, value in said.items()}


def _layers(layers: tuple[LayerConfiguration, ...]) -> list[dict[str, object]]:
    """Return the layers; the parts of a folded layer become one layer again, at the place of the last part."""
    parts: dict[str, list[LayerConfiguration]] = {}
    for layer in layers:
        parts.setdefault(layer.declared, []).append(layer)
    return [_layer(parts[layer.name]) for layer in layers if layer.name == layer.declared]


def _layer(parts: list[LayerConfiguration]) -> dict[str, object]:
    first, last = parts[0], parts[-1]
    kind = LAYER_KINDS[last.type]
    document: dict[str, object] = {"name": last.name, "type": last.type}
    if kind.folded:
        document["outputdims"] = [part.output_dim for part in parts]
    else:
        document["outputdim"] = last.output_dim
    if last.num_factors is not None:
        document["numfactors"] = last.num_factors
    if kind.inputs == "one":
        document["inputlayer"] = first.inputs[0]
    elif kind.inputs == "many":
        document["inputlayers"] = list(last.inputs)
    functions = [_function(part.transfer_function) for part in parts if part.transfer_function is not None]
    if kind.folded:
        document["transfuncs"] = functions
    elif functions:
        document["transfunc"] = functions[0]
    if last.weight_dim is not None:
        document["weightdims"] = [part.weight_dim for part in parts]
    if last.optimizer_settings is not None:
        document["optimizer"] = _function(last.optimizer_settings)
    if last.loss is not None:
        document["lossfunc"] = _function(last.loss)
    return document


def _function(settings: FunctionSettings) -> dict[str, object]:
    said = {name: number for name, number in settings.parameters.items() if number or name not in REGULARIZATION}
    return {"type": settings.type, **said}
