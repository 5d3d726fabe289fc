"""Reads a configuration file, checks it completely, and writes a configuration as canonical JSON.

The checks: the file is JSON with known keys, the layers form a graph without a cycle that ends in one loss layer, and
the dimensions of all layers fit. Each error names the file, the line and the key.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, NoReturn

from streamiter.errors import ConfigurationError, did_you_mean
from streamiter.networks.configuration.layer_kinds import LAYER_KINDS, LayerContext
from streamiter.networks.configuration.sections import (
    LOSSES,
    OPTIMIZERS,
    REGULARIZATION,
    TRANSFER_FUNCTIONS,
    Defaults,
    named_function,
    read_function,
    read_layers,
)
from streamiter.networks.settings import (
    Configuration,
    DataSettings,
    FunctionSettings,
    LayerConfiguration,
    ModelSettings,
    TrainSettings,
)
from streamiter.values.settings import NOT_GIVEN, KeyPath, Setting, SettingsDocument, any_of, setting_keys, shown_value

_PROBABILITIES: Final = ("Sigmoid", "SigmoidWithDropout", "Softmax")


def likely_mistakes(layers: Sequence[LayerConfiguration], document: SettingsDocument) -> list[str]:
    """Return a warning for a cross entropy of values that may be outside of 0 to 1: its loss falls without bound."""
    by_name = {layer.name: layer for layer in layers}
    return [
        document.problem(
            ("layers", layer.declared, "inputlayer"),
            f"expected probabilities for {layer.loss.type}, given {source.name!r}, which ends with "
            f"{source.transfer_function.type}; end it with Sigmoid, or take LogLoss",
        ).shown(document.source)
        for layer in layers
        if layer.loss is not None and layer.loss.type == "CrossEntropyLoss"
        for source in map(by_name.__getitem__, layer.inputs)
        if source.transfer_function is not None and source.transfer_function.type not in _PROBABILITIES
    ]


_OF_A_MAPPING: Final = "configuration"


def read_source(source: str | PathLike[str] | Mapping[str, object]) -> SettingsDocument:
    """Read a JSON file, or take its content.

    Keys become lower case, because older files have keys such as ``blockSize`` and ``loadPath``, and an array of layers
    becomes an object by name.
    """
    if isinstance(source, Mapping):
        return _Tidy(_OF_A_MAPPING).document(source)
    if not isinstance(source, (str, PathLike)):
        raise ConfigurationError(
            f"{_OF_A_MAPPING}: expected the path of a JSON file, or a dict with its content, "
            f"given {type(source).__name__}"
        )
    path = Path(source)
    try:
        return _Tidy(path.name).document(_parsed(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ConfigurationError(f"{path}: expected a JSON file, given {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path.name}: expected JSON in UTF-8, given a wrong byte at {error.start}") from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{path.name}:{error.lineno}: expected JSON, given something else in column {error.colno}: {error.msg}"
        ) from error
    except RecursionError as error:
        raise ConfigurationError(f"{path.name}: expected JSON, given objects nested too deep to be read") from error
    except ValueError as error:  # It is no JSON for Python, such as a whole number of thousands of digits.
        raise ConfigurationError(f"{path.name}: expected {error}") from error


class _Object(dict[str, object]):
    """An object of a JSON text, with the line of each of its keys."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}
        for numbered, value in pairs:
            name, _, line = numbered.rpartition("\0")
            self[name] = value
            self.lines[name] = int(line)


# In JSON all quotes belong to texts, and a text before a colon is a key.
_TEXT: Final = re.compile(r'"(?:[^"\\]|\\.)*"(?=(\s*:)?)')


def _parsed(text: str) -> object:
    """Return the value of a JSON text, its objects with the line of each key."""
    at, line = 0, 1

    def numbered(match: re.Match[str]) -> str:
        nonlocal at, line
        line += text.count("\n", at, match.start())
        at = match.start()
        return match[0] if match[1] is None else f'{match[0][:-1]}\\u0000{line}"'

    def once(pairs: list[tuple[str, object]]) -> None:
        """Python's JSON would silently keep the last of two layers with one name."""
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1:
                raise ValueError(f"each key of an object once, given {name!r} twice; rename or remove one")

    def no_number(constant: str) -> NoReturn:
        raise ValueError(f"JSON, given {constant}, which is no number of JSON")

    def whole(digits: str) -> int:
        try:
            return int(digits)
        except ValueError as error:
            raise ValueError(f"numbers that can be read, given one that cannot: {error}") from None

    json.loads(text, object_pairs_hook=once, parse_constant=no_number, parse_int=whole)
    return json.loads(_TEXT.sub(numbered, text), object_pairs_hook=_Object)


# Older files of Angel misspell this key.
_OLDER: Final = {"default_trandfunc": "default_transfunc"}


class _Tidy:
    """Makes a document of the content of a file; refuses keys that are given twice or are no texts."""

    def __init__(self, source: str) -> None:
        self._content: dict[str, object] = {}
        self._lines: dict[KeyPath, int] = {}
        self._document = SettingsDocument(source, self._content, self._lines, is_lenient=True)

    def document(self, given: object) -> SettingsDocument:
        if not isinstance(given, Mapping):
            raise self._document.error((), f"expected a JSON object, given {shown_value(given)}")
        self._content |= self._tidy(given, ())
        return self._document

    def _tidy(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, (list, tuple)):
            if path == ("layers",):
                return self._by_name(value)
            return [self._tidy(item, (*path, f"[{number}]")) for number, item in enumerate(value)]
        if not isinstance(value, Mapping):
            if path == ("layers",):
                self._document.refuse(path, f"expected an array or an object of layers, given {shown_value(value)}")
            return value
        found: dict[str, object] = {}
        for spelled, item in value.items():
            if not isinstance(spelled, str) or not spelled:
                self._document.refuse(path, f"expected keys that are texts, given {spelled!r}")
                continue
            name = spelled if path == ("layers",) else _OLDER.get(spelled.lower(), spelled.lower())
            if isinstance(value, _Object):
                self._lines.setdefault((*path, name), value.lines[spelled])
            if name in found:
                self._document.refuse((*path, name), f"expected this key once, given it as {spelled!r} too; keep one")
            found[name] = self._tidy(item, (*path, name))
        if path[:-1] == ("layers",) and found.setdefault("name", path[-1]) != path[-1]:
            given = shown_value(found["name"])
            self._document.refuse((*path, "name"), f"expected the key of the layer, given {given}; leave it out")
        return found

    def _by_name(self, layers: Sequence[Any]) -> dict[str, object]:
        found: dict[str, object] = {}
        for number, layer in enumerate(layers):
            at = ("layers", f"[{number}]")
            given = layer if isinstance(layer, Mapping) else {}
            name = next((value for key, value in given.items() if str(key).lower() == "name"), NOT_GIVEN)
            if isinstance(layer, _Object) and layer:
                self._lines["layers", str(name)] = self._lines[at] = min(layer.lines.values())
            if not isinstance(layer, Mapping):
                self._document.refuse(at, f"expected a layer, given {shown_value(layer)}")
            elif not isinstance(name, str) or not name:
                told = "none" if name is NOT_GIVEN else shown_value(name)
                self._document.refuse((*at, "name"), f"expected a text that is not empty, given {told}; name the layer")
            elif name in found:
                self._document.refuse(
                    ("layers", name, "name"), "expected a name that no other layer has, given two of it; rename one"
                )
            else:
                found[name] = self._tidy(layer, ("layers", name))
        return found


def layers_in_order(layers: Sequence[LayerConfiguration], document: SettingsDocument) -> tuple[LayerConfiguration, ...]:
    """Return the layers, each after its inputs, the loss layer last. Raises ConfigurationError for a bad graph.

    The order follows from the graph alone; it does not depend on the order in the file.
    """
    by_name = {layer.name: layer for layer in layers}
    loss = _loss_layer(layers, document)
    _check_inputs(layers, by_name, document)
    ordered: dict[str, None] = {}
    _visit(loss, by_name, ordered, document)
    needed = tuple(ordered)
    for layer in layers:  # a cycle is reported first, not that it does not lead to the loss layer
        _visit(layer, by_name, ordered, document)
    for layer in layers:
        if layer.name not in needed:
            raise document.error(
                ("layers", layer.declared),
                f"expected a layer that leads to the loss layer {loss.name!r}, given one that does not; "
                "name it as an input of another layer, or remove it",
            )
    return tuple(by_name[name] for name in needed)


def _loss_layer(layers: Sequence[LayerConfiguration], document: SettingsDocument) -> LayerConfiguration:
    found = [layer for layer in layers if LAYER_KINDS[layer.type].is_loss]
    if not found:
        given = ", ".join(f"{layer.name!r} ({layer.type})" for layer in layers) or "no layers"
        raise document.error(("layers",), f"expected a loss layer, of type 'simplelosslayer', given {given}; add one")
    if len(found) > 1:
        names = ", ".join(repr(layer.name) for layer in found)
        raise document.error(("layers", found[1].name, "type"), f"expected one loss layer, given {names}; keep one")
    return found[0]


def _check_inputs(
    layers: Sequence[LayerConfiguration], by_name: Mapping[str, LayerConfiguration], document: SettingsDocument
) -> None:
    for layer in layers:
        for number, name in enumerate(layer.inputs):
            path = _path_of_input(layer, number)
            if name not in by_name:
                others = [other for other in by_name if other != layer.name]
                meant = did_you_mean(name, others) or f"; there are {', '.join(map(repr, others))}"
                raise document.error(path, f"expected the name of a layer, given {name!r}{meant}")
            if LAYER_KINDS[by_name[name].type].is_loss:
                raise document.error(
                    path, f"expected a layer with an output, given {name!r}, a loss layer, which has none"
                )


def _visit(
    start: LayerConfiguration,
    by_name: Mapping[str, LayerConfiguration],
    ordered: dict[str, None],
    document: SettingsDocument,
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
            raise _cycle(list(way), wanted, by_name, document)
        if wanted not in ordered:
            way[wanted] = 0


def _cycle(
    way: list[str], closes_at: str, by_name: Mapping[str, LayerConfiguration], document: SettingsDocument
) -> Exception:
    """Return the error about a cycle, in the direction of the data, opposite to the search."""
    members = way[way.index(closes_at) :]
    data_way = [closes_at, *reversed(members)]
    first = by_name[members[-1]]
    return document.error(
        _path_of_input(first, first.inputs.index(closes_at)),
        f"expected layers without a cycle, given {' → '.join(map(repr, data_way))}; take one of its inputs away",
    )


def _path_of_input(layer: LayerConfiguration, number: int) -> KeyPath:
    if LAYER_KINDS[layer.type].inputs == "one":
        return ("layers", layer.declared, "inputlayer")
    return ("layers", layer.declared, "inputlayers", f"[{number}]")


def with_vector_widths(
    layers: Sequence[LayerConfiguration], data: DataSettings, document: SettingsDocument
) -> tuple[LayerConfiguration, ...]:
    """Return the layers with the widths of their vectors.

    Raises ConfigurationError for the first layer whose output dimension does not fit its inputs.
    """
    graph = LayerContext(document, data, {layer.name: layer for layer in layers}, {})
    for layer in layers:
        if check := LAYER_KINDS[layer.type].check:
            check(layer, graph)
    return tuple(replace(layer, vector_width=graph.vector_widths.get(layer.name)) for layer in layers)


_SECTIONS: Final = {"data": DataSettings, "model": ModelSettings, "train": TrainSettings}
_KEYS: Final = {name: setting_keys(kind, lambda field: field.replace("_", "")) for name, kind in _SECTIONS.items()}
_DEFAULTS: Final = {
    "default_optimizer": (OPTIMIZERS, "Momentum"),
    "default_transfunc": (TRANSFER_FUNCTIONS, "Identity"),
    "default_lossfunc": (LOSSES, "LogLoss"),
}


def read_configuration(source: str | PathLike[str] | Mapping[str, object]) -> Configuration:
    """Read the configuration of a network from a JSON file, or from the content of one.

    Raises SettingsError with all errors of the values, each with its line, or with the first error of the graph.
    Unknown keys and likely mistakes are ``warnings`` of the result.

    >>> configuration = read_configuration({"layers": [
    ...     {"type": "SimpleLossLayer", "name": "loss", "inputlayer": "wide"},
    ...     {"type": "SimpleInputLayer", "name": "wide", "outputdim": 1},
    ... ]})
    >>> [layer.name for layer in configuration.layers], configuration.train.epoch
    (['wide', 'loss'], 30)
    """
    document = read_source(source)
    keys = {name: Setting(any_of) for name in (*_SECTIONS, *_DEFAULTS)}
    document.table((), keys | {"layers": Setting(any_of, is_required=True)})
    data, model, train = (kind(**document.table((name,), _KEYS[name])) for name, kind in _SECTIONS.items())
    defaults = Defaults(
        *(
            read_function(document, (key,), kinds, named_function(kinds, name))
            for key, (kinds, name) in _DEFAULTS.items()
        )
    )
    layers = read_layers(document, defaults, train)
    document.check()
    ordered = with_vector_widths(layers_in_order(layers, document), data, document)
    warnings = (*document.warnings, *likely_mistakes(ordered, document))
    return Configuration(document.source, data, model, train, ordered, warnings)


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
