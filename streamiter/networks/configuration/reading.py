"""A configuration file, read and checked whole."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Final

from streamiter.networks.configuration.dimensions import check_dimensions
from streamiter.networks.configuration.functions import (
    LOSSES,
    OPTIMIZERS,
    TRANSFER_FUNCTIONS,
    FunctionKinds,
    read_function,
)
from streamiter.networks.configuration.keys import Keys
from streamiter.networks.configuration.layers import Defaults, LayerReader
from streamiter.networks.configuration.likely_mistakes import likely_mistakes
from streamiter.networks.configuration.order import in_order
from streamiter.networks.configuration.sections import read_data, read_model, read_train
from streamiter.networks.configuration.settings import Configuration, FunctionSettings
from streamiter.networks.configuration.source import read_source

__all__ = ["read_configuration"]

# Older files of Angel misspell this one.
_DEFAULTS: Final[Mapping[str, tuple[FunctionKinds, str, tuple[str, ...]]]] = {
    "default_optimizer": (OPTIMIZERS, "Momentum", ()),
    "default_transfunc": (TRANSFER_FUNCTIONS, "Identity", ("default_trandfunc",)),
    "default_lossfunc": (LOSSES, "LogLoss", ()),
}


def read_configuration(source: str | PathLike[str] | Mapping[str, Any]) -> Configuration:
    """The configuration of a network, from a JSON file or from what one says.

    ConfigurationError for the first thing that is wrong, naming the file, the layer and the key; unknown keys and
    likely mistakes are ``warnings`` of the result.

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

    def kept(result: Any) -> Any:
        settings, found = result
        warnings.extend(found)
        return settings

    data = kept(read_data(keys.raw("data", {}), file.section("data")))
    model = kept(read_model(keys.raw("model", {}), file.section("model")))
    train = kept(read_train(keys.raw("train", {}), file.section("train")))
    defaults = Defaults(*(kept(_default(keys, key, *settings)) for key, settings in _DEFAULTS.items()))
    if "layers" not in keys:
        raise file.error(f"expected the key 'layers', given {keys.listed()}; add it")
    reader = LayerReader(file, defaults, train)
    layers = in_order(reader.read(keys.raw("layers")), file)
    check_dimensions(layers, data, file)
    return Configuration(
        source=file.file,
        data=data,
        model=model,
        train=train,
        layers=layers,
        warnings=(*keys.unknown(), *warnings, *reader.warnings, *likely_mistakes(layers, file)),
    )


def _default(
    keys: Keys, key: str, kinds: FunctionKinds, unsaid: str, older: tuple[str, ...]
) -> tuple[FunctionSettings, list[str]]:
    spelled = [name for name in (key, *older) if name in keys]
    if len(spelled) > 1:
        raise keys.place(spelled[1]).error(f"expected it once, given {key!r} too; keep {key!r}")
    if not spelled:
        return read_function(unsaid, kinds, keys.where.key(key))
    return read_function(keys.raw(spelled[0]), kinds, keys.place(spelled[0]))
