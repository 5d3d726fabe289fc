"""Reads parts of a configuration file: optimizers and other functions, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from streamiter.networks import functions
from streamiter.networks.configuration.layer_kinds import LAYER_KINDS, LayerKind, kind_of
from streamiter.networks.settings import FunctionSettings, LayerConfiguration, TrainSettings
from streamiter.parameter_server.optimizers import FTRL, SGD, AdaDelta, Adam, Momentum, Optimizer, RMSProp
from streamiter.values.settings import (
    FRACTION,
    NOT_GIVEN,
    NOT_NEGATIVE,
    POSITIVE,
    KeyPath,
    Parser,
    Setting,
    SettingsDocument,
    WrongValue,
    any_of,
    choice_of,
    items_of,
    text_of,
    whole_of,
)


@dataclass(frozen=True, slots=True)
class FunctionKinds:
    """All functions for one purpose, in Angel's spelling: optimizers, transfer functions, or losses.

    A file gives a function as a name, or as an object with ``type`` and parameters.
    """

    noun: str
    """One of them with its article, for messages."""
    kinds: Mapping[str, tuple[Callable[..., Any], Mapping[str, tuple[float, Parser]]]]
    """For each function its class, and its parameters, each with its default and its allowed numbers."""
    overruled: frozenset[str] = frozenset()
    """Keys of Angel that have no effect, because the engine knows their value."""


# Angel has the same defaults (docs/basic/optimizer_on_angel_en.md).
REGULARIZATION: Final = {"reg1": (0.0, NOT_NEGATIVE), "reg2": (0.0, NOT_NEGATIVE)}
"""Parameters of optimizers that canonical JSON leaves out if they are 0."""

_DROPOUT: Final = {"proba": (0.5, FRACTION)}

OPTIMIZERS: Final = FunctionKinds(
    "an optimizer",
    {
        "SGD": (SGD, REGULARIZATION),
        "Momentum": (Momentum, {"momentum": (0.9, FRACTION), **REGULARIZATION}),
        # Angel's "AdaGrad" forgets old gradients, as RMSProp does.
        "AdaGrad": (RMSProp, {"beta": (0.9, FRACTION), **REGULARIZATION}),
        "AdaDelta": (AdaDelta, {"alpha": (0.9, FRACTION), "beta": (0.9, FRACTION), **REGULARIZATION}),
        "Adam": (Adam, {"beta": (0.9, FRACTION), "gamma": (0.99, FRACTION), **REGULARIZATION}),
        "FTRL": (FTRL, {"alpha": (0.1, POSITIVE), "beta": (1.0, NOT_NEGATIVE), **REGULARIZATION}),
        # With the gradient of the k-means loss, a step moves a centre towards the mean of its nearest rows.
        "KmeansOptimizer": (SGD, {}),
    },
)

TRANSFER_FUNCTIONS: Final = FunctionKinds(
    "a transfer function",
    {
        "Identity": (functions.IdentityFunction, {}),
        "Sigmoid": (functions.Sigmoid, {}),
        "Relu": (functions.Relu, {}),
        "Tanh": (functions.Tanh, {}),
        "Softmax": (functions.Softmax, {}),
        "Dropout": (functions.Dropout, _DROPOUT),
        "SigmoidWithDropout": (functions.SigmoidWithDropout, _DROPOUT),
        "TanhWithDropout": (functions.TanhWithDropout, _DROPOUT),
    },
    # Training or prediction, which the network knows.
    overruled=frozenset({"actiontype"}),
)

LOSSES: Final = FunctionKinds(
    "a loss function",
    {
        "L2Loss": (functions.L2Loss, {}),
        "LogLoss": (functions.NetworkLogLoss, {}),
        "HingeLoss": (functions.NetworkHingeLoss, {}),
        "CrossEntropyLoss": (functions.CrossEntropyLoss, {}),
        "SoftmaxLoss": (functions.SoftmaxLoss, {}),
        "HuberLoss": (functions.NetworkHuberLoss, {"delta": (1.0, POSITIVE)}),
        "KmeansLoss": (functions.KMeansLoss, {}),
    },
)


def optimizer(settings: FunctionSettings, train: TrainSettings) -> Optimizer:
    """Return the optimizer. FTRL has the learning rate ``alpha``; all others have ``lr``."""
    names = {"reg1": "l1", "reg2": "l2"}
    numbers = {names.get(name, name): number for name, number in settings.parameters.items()}
    rule: Callable[..., Optimizer] = OPTIMIZERS.kinds[settings.type][0]
    return rule(**numbers) if settings.type == "FTRL" else rule(train.learning_rate, **numbers)


def named_function(kinds: FunctionKinds, name: str, given: Mapping[str, float] | None = None) -> FunctionSettings:
    """Return a function with the given parameters, and the defaults of the others."""
    make, parameters = kinds.kinds[name]
    return FunctionSettings(
        name, {key: (given or {}).get(key, default) for key, (default, _) in parameters.items()}, make
    )


def read_function(
    document: SettingsDocument, path: KeyPath, kinds: FunctionKinds, default: FunctionSettings
) -> FunctionSettings:
    """Return the function at ``path``; the default if there is none, or a wrong one."""
    given = document.value(path)
    if given is NOT_GIVEN:
        return default
    type_path = (*path, "type") if isinstance(given, Mapping) else path
    try:
        name = choice_of(*kinds.kinds, any_case=True, noun=kinds.noun)(document.value(type_path))
    except WrongValue as wrong:
        document.refuse_value(type_path, wrong)
        return default
    keys = {key: Setting(any_of) for key in ("type", *kinds.overruled)}
    keys |= {key: Setting(parse) for key, (_, parse) in kinds.kinds[name][1].items()}
    return named_function(kinds, name, document.table(path, keys) if isinstance(given, Mapping) else None)


_NO_DIM: Final = -1
"""The output dimension of a loss layer in files that Angel saves."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The functions of layers that name none; as in Angel: Momentum, the identity, the logistic loss."""

    optimizer: FunctionSettings
    transfer_function: FunctionSettings
    loss: FunctionSettings


def read_layers(document: SettingsDocument, defaults: Defaults, train: TrainSettings) -> list[LayerConfiguration]:
    """Return the layers without errors in the order of the file; a folded layer becomes several."""
    found: dict[str, LayerConfiguration] = {}
    for declared in document.names(("layers",)):
        for layer in _Layer(document, declared, defaults).read(train):
            other = found.setdefault(layer.name, layer)
            if other is not layer:
                folded = declared if declared != layer.name else other.declared
                document.refuse(
                    ("layers", layer.name, "name"),
                    "expected a name that no other layer has, given two of it, one of them a part of "
                    f"{folded!r}, which is several layers; rename one",
                )
    return list(found.values())


def _layer_name_of(value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise WrongValue("the name of one layer", "write it in quotes, or use a layer type that has inputlayers")


_SIZE: Final = whole_of(1)
_SIZES: Final = items_of(_SIZE, "whole numbers")


@dataclass(slots=True)
class _Layer:
    """Reads one layer by the keys of its type."""

    document: SettingsDocument
    name: str
    defaults: Defaults

    def read(self, train: TrainSettings) -> list[LayerConfiguration]:
        """Return the layer, several if it is folded, or none if it has an error."""
        document, path = self.document, self._path()
        if not isinstance(document.value(path), Mapping):
            document.table(path, {})
            return []
        type_path = self._path("type")
        try:
            type_name = kind_of(document.value(type_path))
        except WrongValue as wrong:
            document.refuse_value(type_path, wrong)
            return []
        kind = LAYER_KINDS[type_name]
        is_several = kind.folded and "outputdims" in document.names(path)
        settings = document.table(path, self._keys(kind, is_several=is_several))
        layer = LayerConfiguration(
            self.name,
            type_name,
            _NO_DIM,
            tuple(settings.get("inputlayers", [settings[key] for key in ("inputlayer",) if key in settings])),
            num_factors=settings.get("numfactors"),
            declared=self.name,
        )
        if kind.is_trainable:
            rule = read_function(document, self._path("optimizer"), OPTIMIZERS, self.defaults.optimizer)
            layer = replace(layer, optimizer_settings=rule, optimizer=optimizer(rule, train))
        if kind.is_loss:
            layer = replace(layer, loss=read_function(document, self._path("lossfunc"), LOSSES, self.defaults.loss))
        self._check_inputs(kind, layer.inputs)
        if is_several:
            return self._unfolded(layer, settings)
        if kind.has_transfer_function:
            layer = replace(layer, transfer_function=self._transfer_function("transfunc"))
        dim = settings.get("outputdim", kind.default_dim or _NO_DIM)
        return [] if document.is_wrong(path) else [replace(layer, output_dim=dim, weight_dim=settings.get("weightdim"))]

    def _path(self, *below: str) -> KeyPath:
        return ("layers", self.name, *below)

    def _keys(self, kind: LayerKind, *, is_several: bool) -> dict[str, Setting]:
        """Return the keys of the layer; ``is_several``: they end with s, and have arrays."""
        keys = {"name": Setting(any_of), "type": Setting(any_of)}
        end, sizes = ("s", _SIZES) if is_several else ("", _SIZE)
        if kind.inputs == "one":
            keys["inputlayer"] = Setting(_layer_name_of, is_required=True)
        elif kind.inputs == "many":
            keys["inputlayers"] = Setting(items_of(text_of, "names of layers"), is_required=True)
        if kind.is_trainable:
            keys["optimizer"] = Setting(any_of)
        if kind.is_loss:
            keys |= {"outputdim": Setting(whole_of(1, off=_NO_DIM)), "lossfunc": Setting(any_of)}
        else:
            keys[f"outputdim{end}"] = Setting(sizes, is_required=kind.default_dim is None)
        if kind.has_factors:
            keys["numfactors"] = Setting(_SIZE, is_required=True)
        if kind.has_transfer_function:
            keys[f"transfunc{end}"] = Setting(any_of)
        if kind.has_weight_dims:
            keys[f"weightdim{end}"] = Setting(sizes, is_required=True)
        if kind.folded:
            self._refuse_beside(keys, f"outputdim{end}")
        return keys

    def _refuse_beside(self, keys: dict[str, Setting], base: str) -> None:
        """Refuse keys of one layer beside ``outputdims``, and those of several beside ``outputdim``."""
        for other in ("outputdim", "transfunc", "weightdim") if base == "outputdims" else ("transfuncs", "weightdims"):
            if other in self.document.names(self._path()):
                keys[other] = Setting(any_of)
                fits = f"{other}s" if base == "outputdims" else other.removesuffix("s")
                self.document.refuse(
                    self._path(other),
                    f"expected {fits!r} with {base!r}, given {other!r}; rename it"
                    if fits != base
                    else f"expected one of {base!r} and {other!r}, given both; keep one",
                )

    def _check_inputs(self, kind: LayerKind, names: Sequence[str]) -> None:
        least, most = kind.least_inputs, kind.most_inputs
        if names and kind.inputs == "many" and not least <= len(names) <= (most or len(names)):
            bounds = f"{least}" if least == most else f"at least {least}"
            self.document.refuse(
                self._path("inputlayers"),
                f"expected {bounds} layers, given {len(names)}: {', '.join(names)}; name {bounds}, or use another type",
            )

    def _transfer_function(self, *below: str) -> FunctionSettings:
        default = self.defaults.transfer_function
        return read_function(self.document, self._path(*below), TRANSFER_FUNCTIONS, default)

    def _unfolded(self, layer: LayerConfiguration, settings: Mapping[str, Any]) -> list[LayerConfiguration]:
        """Return the layers ``name_0``, ``name_1``, …, ``name``; each has the one before as its input."""
        dims: Sequence[int] = settings.get("outputdims", ())
        weight_dims: Sequence[int | None] = settings.get("weightdims", [None] * len(dims))
        transfer_functions = [self.defaults.transfer_function] * len(dims)
        if "transfuncs" in settings:
            given = settings["transfuncs"]
            if not isinstance(given, list):
                self.document.refuse_value(
                    self._path("transfuncs"),
                    WrongValue("an array of transfer functions", "write one for each of outputdims between [ and ]"),
                )
                return []
            transfer_functions = [self._transfer_function("transfuncs", f"[{at}]") for at in range(len(given))]
        for key, values in (("transfuncs", transfer_functions), ("weightdims", weight_dims)):
            if dims and len(values) != len(dims):
                self.document.refuse(
                    self._path(key),
                    f"expected {len(dims)}, one for each of outputdims, given {len(values)}; make both of one length",
                )
        if self.document.is_wrong(self._path()):
            return []
        names = [f"{self.name}_{number}" for number in range(len(dims) - 1)] + [self.name]
        return [
            replace(
                layer,
                name=name,
                inputs=layer.inputs if number == 0 else (names[number - 1],),
                output_dim=dims[number],
                transfer_function=transfer_functions[number],
                weight_dim=weight_dims[number],
                part=number,
            )
            for number, name in enumerate(names)
        ]
