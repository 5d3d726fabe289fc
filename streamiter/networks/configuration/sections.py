"""Reads parts of a configuration file: optimizers and other functions, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from streamiter.networks import functions
from streamiter.networks.configuration.layer_kinds import LAYER_KINDS, LayerKind, find_kind
from streamiter.networks.settings import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    FiniteNumber,
    FunctionSettings,
    Keys,
    LayerConfiguration,
    TrainSettings,
    Where,
    similar_names,
)
from streamiter.parameter_server.optimizers import FTRL, SGD, AdaDelta, Adam, Momentum, Optimizer, RMSProp


@dataclass(frozen=True, slots=True)
class FunctionKinds:
    """All functions for one purpose, in Angel's spelling: optimizers, transfer functions, or losses.

    A file gives a function as a name, or as an object with ``type`` and parameters.
    """

    purpose: str
    """The purpose with its article, for messages."""
    kinds: Mapping[str, tuple[Callable[..., Any], Mapping[str, tuple[float, FiniteNumber]]]]
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


def read_function(given: object, kinds: FunctionKinds, where: Where, warnings: list[str]) -> FunctionSettings:
    """Return the function with the defaults of its parameters; add a warning for each unknown key."""
    if isinstance(given, str):
        spelled = _known(given, kinds, where)
        make, parameters = kinds.kinds[spelled]
        return FunctionSettings(spelled, {name: default for name, (default, _) in parameters.items()}, make)
    if not isinstance(given, Mapping):
        raise where.wrong_kind(f"{kinds.purpose}: its name, or an object with 'type'", given)
    keys = Keys(given, where)
    if "type" not in keys:
        raise where.error(f"expected the key 'type', which names {kinds.purpose}, given {keys.listed()}; add it")
    given_type = keys.raw("type")
    if not isinstance(given_type, str):
        raise keys.place("type").wrong_kind(f"the name of {kinds.purpose}", given_type)
    spelled = _known(given_type, kinds, keys.place("type"))
    for key in kinds.overruled:
        keys.raw(key)
    make, parameters = kinds.kinds[spelled]
    numbers = {name: read(keys, name, default) for name, (default, read) in parameters.items()}
    warnings += keys.unknown()
    return FunctionSettings(spelled, numbers, make)


def _known(name: str, kinds: FunctionKinds, where: Where) -> str:
    spelled = next((known for known in kinds.kinds if known.lower() == name.lower()), None)
    if spelled is None:
        raise where.error(f"expected {kinds.purpose}, given {name!r}{similar_names(name, kinds.kinds)}")
    return spelled


_NO_DIM: Final = -1
"""The output dimension of a loss layer in files that Angel saves."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The functions of layers that name none; as in Angel: Momentum, the identity, the logistic loss."""

    optimizer: FunctionSettings
    transfer_function: FunctionSettings
    loss: FunctionSettings


@dataclass(slots=True)
class LayerReader:
    """Reads the layers of a file, an array or an object; each is read by the keys of its type."""

    file: Where
    defaults: Defaults
    train: TrainSettings
    warnings: list[str]
    """A warning for each unknown key."""

    def read(self, given: object) -> list[LayerConfiguration]:
        """Return all layers in the order of the file; a folded layer becomes several."""
        found: list[LayerConfiguration] = []
        names: dict[str, str] = {}
        for layers in self._declared(given):
            for layer in layers:
                if layer.name in names:
                    raise self._named_twice(layer, names[layer.name])
                names[layer.name] = layer.declared
            found += layers
        return found

    def _declared(self, given: object) -> Iterator[list[LayerConfiguration]]:
        if isinstance(given, Mapping):
            for name, layer in given.items():
                if not isinstance(name, str) or not name:
                    raise self.file.key("layers").error(f"expected the names of layers as keys, given {name!r}")
                where = self.file.layer(name)
                keys = Keys(layer, where)
                if keys.raw("name", name) != name:
                    raise keys.place("name").error(
                        f"expected the key of the layer, {name!r}, given {keys.raw('name')!r}; leave it out"
                    )
                yield self._layer(name, keys, where)
        elif isinstance(given, (list, tuple)):
            for number, layer in enumerate(given, 1):
                where = self.file.nameless_layer(number)
                keys = Keys(layer, where)
                self._require(keys, "name", where)
                name = keys.text("name", "")
                assert name is not None
                where = self.file.layer(name)
                yield self._layer(name, Keys(layer, where), where)
        else:
            raise self.file.key("layers").wrong_kind("an array or an object of layers", given)

    def _layer(self, name: str, keys: Keys, where: Where) -> list[LayerConfiguration]:
        keys.raw("name")
        self._require(keys, "type", where)
        given_type = keys.raw("type")
        if not isinstance(given_type, str):
            raise keys.place("type").wrong_kind("the type of a layer", given_type)
        spelled = find_kind(given_type)
        if spelled is None:
            raise keys.place("type").error(
                f"expected a type of layer, given {given_type!r}{similar_names(given_type, LAYER_KINDS)}"
            )
        kind = LAYER_KINDS[spelled]
        layer = LayerConfiguration(name, spelled, _NO_DIM, self._inputs(keys, kind), declared=name)
        if kind.is_trainable:
            layer = self._trainable(layer, keys)
        layers = self._unfolded(layer, keys) if kind.folded else [self._plain(layer, keys, kind)]
        self.warnings += keys.unknown()
        return layers

    # -- the keys of a layer

    def _inputs(self, keys: Keys, kind: LayerKind) -> tuple[str, ...]:
        if kind.inputs == "none":
            return ()
        if kind.inputs == "one":
            self._require(keys, "inputlayer", keys.where)
            return (self._name_of_layer(keys.raw("inputlayer"), keys.place("inputlayer")),)
        self._require(keys, "inputlayers", keys.where)
        where, given = keys.place("inputlayers"), keys.raw("inputlayers")
        names = [self._name_of_layer(name, place) for name, place in _items(given, where, "names of layers")]
        least, most = kind.least_inputs, kind.most_inputs
        if len(names) < least or (most is not None and len(names) > most):
            bounds = f"{least}" if least == most else f"at least {least}"
            layers = "layer" if least == 1 else "layers"
            raise where.error(f"expected {bounds} {layers}, given {len(names)}: {', '.join(names) or 'none'}")
        return tuple(names)

    @staticmethod
    def _name_of_layer(given: object, where: Where) -> str:
        if not isinstance(given, str) or not given:
            raise where.wrong_kind("the name of a layer", given)
        return given

    def _trainable(self, layer: LayerConfiguration, keys: Keys) -> LayerConfiguration:
        settings = self._function(keys, "optimizer", OPTIMIZERS, self.defaults.optimizer)
        return replace(layer, optimizer_settings=settings, optimizer=optimizer(settings, self.train))

    def _plain(self, layer: LayerConfiguration, keys: Keys, kind: LayerKind) -> LayerConfiguration:
        if kind.is_loss:
            dim = keys.whole("outputdim", _NO_DIM, 1, off=_NO_DIM)
            return replace(layer, output_dim=dim, loss=self._function(keys, "lossfunc", LOSSES, self.defaults.loss))
        if kind.default_dim is None or "outputdim" in keys:
            layer = replace(layer, output_dim=self._required_whole(keys, "outputdim"))
        else:
            layer = replace(layer, output_dim=kind.default_dim)
        if kind.has_factors:
            layer = replace(layer, num_factors=self._required_whole(keys, "numfactors"))
        return self._with_transfer_function(layer, keys) if kind.has_transfer_function else layer

    def _with_transfer_function(self, layer: LayerConfiguration, keys: Keys) -> LayerConfiguration:
        function = self._function(keys, "transfunc", TRANSFER_FUNCTIONS, self.defaults.transfer_function)
        return replace(layer, transfer_function=function)

    def _unfolded(self, layer: LayerConfiguration, keys: Keys) -> list[LayerConfiguration]:
        """Return the layers ``name_0``, ``name_1``, …, ``name``; each has the one before as its input."""
        has_weight_dims = LAYER_KINDS[layer.type].has_weight_dims
        if "outputdims" not in keys:
            self._refuse_beside(keys, "outputdim", ("transfuncs", "weightdims"))
            layer = replace(layer, output_dim=self._required_whole(keys, "outputdim", "outputdims"))
            if has_weight_dims:
                layer = replace(layer, weight_dim=self._required_whole(keys, "weightdim"))
            return [self._with_transfer_function(layer, keys)]
        self._refuse_beside(keys, "outputdims", ("outputdim", "transfunc", "weightdim"))
        dims = self._whole_numbers(keys, "outputdims")
        transfer_functions = self._transfer_functions(keys, len(dims))
        weight_dims: Sequence[int | None] = [None] * len(dims)
        if has_weight_dims:
            self._require(keys, "weightdims", keys.where)
            weight_dims = self._whole_numbers(keys, "weightdims")
            _check_length(keys.place("weightdims"), "one for each of outputdims", len(dims), len(weight_dims))
        names = [f"{layer.name}_{number}" for number in range(len(dims) - 1)] + [layer.name]
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

    def _transfer_functions(self, keys: Keys, count: int) -> list[FunctionSettings]:
        if "transfuncs" not in keys:
            return [self.defaults.transfer_function] * count
        where = keys.place("transfuncs")
        transfer_functions = [
            read_function(given, TRANSFER_FUNCTIONS, place, self.warnings)
            for given, place in _items(keys.raw("transfuncs"), where, "transfer functions")
        ]
        _check_length(where, "one for each of outputdims", count, len(transfer_functions))
        return transfer_functions

    # -- values

    def _function(self, keys: Keys, key: str, kinds: FunctionKinds, default: FunctionSettings) -> FunctionSettings:
        if key not in keys:
            return default
        return read_function(keys.raw(key), kinds, keys.place(key), self.warnings)

    def _required_whole(self, keys: Keys, key: str, also: str | None = None) -> int:
        self._require(keys, key, keys.where, also)
        return keys.whole_at(keys.place(key), keys.raw(key), 1)

    @staticmethod
    def _whole_numbers(keys: Keys, key: str) -> list[int]:
        items = _items(keys.raw(key), keys.place(key), "whole numbers")
        numbers = [keys.whole_at(place, value, 1) for value, place in items]
        if not numbers:
            raise keys.place(key).error("expected at least one number, given none")
        return numbers

    @staticmethod
    def _require(keys: Keys, key: str, where: Where, also: str | None = None) -> None:
        if key not in keys:
            wanted = f"the key {key!r}" if also is None else f"the key {key!r} or {also!r}"
            raise where.error(f"expected {wanted}, given {keys.listed()}; add it")

    @staticmethod
    def _refuse_beside(keys: Keys, key: str, others: Sequence[str]) -> None:
        for other in others:
            if other in keys:
                fits = f"{other}s" if key == "outputdims" else other.removesuffix("s")
                raise keys.place(other).error(
                    f"expected {fits!r} with {key!r}, given {other!r}"
                    if fits != key
                    else f"expected one of {key!r} and {other!r}, given both"
                )

    def _named_twice(self, layer: LayerConfiguration, first: str) -> Exception:
        second = layer.declared
        if first == second == layer.name:
            given = "two of it"
        else:
            folded = second if second != layer.name else first
            given = f"two of it, one of them a part of {folded!r}, which is several layers"
        return (
            self.file.layer(layer.name)
            .key("name")
            .error(f"expected a name that no other layer has, given {given}; rename one")
        )


def _items(given: object, where: Where, what: str) -> Iterator[tuple[object, Where]]:
    if not isinstance(given, (list, tuple)):
        raise where.wrong_kind(f"an array of {what}", given)
    return ((item, where.item(index)) for index, item in enumerate(given))


def _check_length(where: Where, what: str, expected: int, given: int) -> None:
    if expected != given:
        raise where.error(f"expected {expected}, {what}, given {given}; make both of one length")
