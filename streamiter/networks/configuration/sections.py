"""Reads the parts of a configuration file: optimizers and other functions, the sections, and the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from streamiter.networks.configuration.settings import (
    LAYER_KINDS,
    DataFormat,
    DataSettings,
    FunctionSettings,
    InitialWay,
    Keys,
    LabelTransformation,
    LayerConfiguration,
    LayerKind,
    ModelSettings,
    TrainSettings,
    Where,
    find_kind,
    nearest,
)
from streamiter.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    Adam,
    Constant,
    Correction,
    InverseSquareRoot,
    LearningRate,
    Momentum,
    Optimizer,
    RMSProp,
    WarmRestarts,
)

_LEARNING_RATES: Final[Mapping[str, Callable[[TrainSettings], LearningRate]]] = {
    "ConstantLearningRate": lambda train: Constant(train.lr),
    "StandardDecay": lambda train: InverseSquareRoot(train.lr, train.decay_alpha),
    "CorrectionDecay": lambda train: Correction(train.lr, train.decay_alpha, train.decay_beta),
    "WarmRestarts": lambda train: WarmRestarts(train.lr, train.decay_alpha),
}

DECAYS: Final = tuple(_LEARNING_RATES)
"""The values of ``decayclass`` in Angel's spelling."""

DECAY_ALIASES: Final = {"Constant": "ConstantLearningRate"}
"""Other spellings of them."""

# Angel's "AdaGrad" forgets old gradients, as RMSProp does.
_OPTIMIZERS: Final[Mapping[str, Callable[..., Optimizer]]] = {
    "SGD": SGD,
    "Momentum": Momentum,
    "AdaGrad": RMSProp,
    "AdaDelta": AdaDelta,
    "Adam": Adam,
    "FTRL": FTRL,
    # With the gradient of the k-means loss, a step moves a centre towards the mean of its nearest rows.
    "KmeansOptimizer": SGD,
}
_WITH_A_RATE_OF_ITS_OWN: Final = frozenset({"FTRL"})
_NAMES: Final = {"reg1": "l1", "reg2": "l2"}


def learning_rate(train: TrainSettings) -> LearningRate:
    """Return the learning rate, which starts with ``lr`` and decays with the number of updates."""
    return _LEARNING_RATES[train.decay_class](train)


def optimizer(settings: FunctionSettings, train: TrainSettings) -> Optimizer:
    """Return the optimizer. FTRL has the learning rate ``alpha``; all others have ``lr``."""
    numbers = {_NAMES.get(name, name): number for name, number in settings.parameters.items()}
    rule = _OPTIMIZERS[settings.type]
    return rule(**numbers) if settings.type in _WITH_A_RATE_OF_ITS_OWN else rule(learning_rate(train), **numbers)


@dataclass(frozen=True, slots=True)
class _Number:
    """A parameter of a function: its default and its allowed numbers."""

    default: float
    expected: str
    is_allowed: Callable[[float], bool]


def _fraction(default: float) -> _Number:
    return _Number(default, "a number from 0 to below 1", lambda number: 0.0 <= number < 1.0)


def _positive(default: float) -> _Number:
    return _Number(default, "a number above 0", lambda number: 0.0 < number < math.inf)


def _not_negative(default: float) -> _Number:
    return _Number(default, "a number of 0 or more", lambda number: 0.0 <= number < math.inf)


@dataclass(frozen=True, slots=True)
class FunctionKinds:
    """All functions for one purpose, in Angel's spelling: optimizers, transfer functions, or losses.

    A file gives a function as a name, or as an object with ``type`` and parameters.
    """

    purpose: str
    """The purpose with its article, for messages."""
    kinds: Mapping[str, Mapping[str, _Number]]
    unsaid_when_0: frozenset[str] = frozenset()
    """Parameters of all functions that canonical JSON leaves out if they are 0."""
    overruled: frozenset[str] = frozenset()
    """Keys of Angel that have no effect, because the engine knows their value."""

    def find(self, name: str) -> str | None:
        """Return the spelling of a type that is given in any case."""
        return next((known for known in self.kinds if known.lower() == name.lower()), None)


# Angel has the same defaults (docs/basic/optimizer_on_angel_en.md).
_REGULARIZATION: Final = {"reg1": _not_negative(0.0), "reg2": _not_negative(0.0)}

OPTIMIZERS: Final = FunctionKinds(
    "an optimizer",
    {
        "SGD": _REGULARIZATION,
        "Momentum": {"momentum": _fraction(0.9), **_REGULARIZATION},
        "AdaGrad": {"beta": _fraction(0.9), **_REGULARIZATION},
        "AdaDelta": {"alpha": _fraction(0.9), "beta": _fraction(0.9), **_REGULARIZATION},
        "Adam": {"beta": _fraction(0.9), "gamma": _fraction(0.99), **_REGULARIZATION},
        "FTRL": {"alpha": _positive(0.1), "beta": _not_negative(1.0), **_REGULARIZATION},
        "KmeansOptimizer": {},
    },
    unsaid_when_0=frozenset(_REGULARIZATION),
)

TRANSFER_FUNCTIONS: Final = FunctionKinds(
    "a transfer function",
    {
        "Identity": {},
        "Sigmoid": {},
        "Relu": {},
        "Tanh": {},
        "Softmax": {},
        "Dropout": {"proba": _fraction(0.5)},
        "SigmoidWithDropout": {"proba": _fraction(0.5)},
        "TanhWithDropout": {"proba": _fraction(0.5)},
    },
    # Training or prediction, which the network knows.
    overruled=frozenset({"actiontype"}),
)

LOSSES: Final = FunctionKinds(
    "a loss function",
    {
        "L2Loss": {},
        "LogLoss": {},
        "HingeLoss": {},
        "CrossEntropyLoss": {},
        "SoftmaxLoss": {},
        "HuberLoss": {"delta": _positive(1.0)},
        "KmeansLoss": {},
    },
)


def read_function(given: object, kinds: FunctionKinds, where: Where, warnings: list[str]) -> FunctionSettings:
    """Return the function with the defaults of its parameters; add a warning for each unknown key."""
    if isinstance(given, str):
        spelled = _known(given, kinds, where)
        return FunctionSettings(spelled, {name: number.default for name, number in kinds.kinds[spelled].items()})
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
    numbers = {
        name: keys.number(name, number.default, number.expected, number.is_allowed)
        for name, number in kinds.kinds[spelled].items()
    }
    warnings += keys.unknown()
    return FunctionSettings(spelled, numbers)


def _known(name: str, kinds: FunctionKinds, where: Where) -> str:
    spelled = kinds.find(name)
    if spelled is None:
        raise where.error(f"expected {kinds.purpose}, given {name!r}{nearest(name, kinds.kinds)}")
    return spelled


_MODEL_TYPES: Final = [
    f"T_{number}_{storage}" for number in ("FLOAT", "DOUBLE") for storage in ("DENSE", "SPARSE", "SPARSE_LONGKEY")
]


def read_data(given: object, where: Where, warnings: list[str]) -> DataSettings:
    """Read the section ``data``; add a warning for each unknown key."""
    keys, default = Keys(given, where), DataSettings()
    settings = DataSettings(
        format=keys.choice("format", default.format, get_args(DataFormat)),  # type: ignore[arg-type]
        path=keys.text("path", default.path),
        index_range=keys.whole("indexrange", default.index_range, 1, off=-1),
        num_field=keys.whole("numfield", default.num_field, 1, off=-1),
        validate_ratio=keys.number(
            "validateratio", default.validate_ratio, "a number from 0 to below 1", lambda ratio: 0.0 <= ratio < 1.0
        ),
        sample_ratio=keys.number(
            "sampleratio", default.sample_ratio, "a number above 0, of at most 1", lambda ratio: 0.0 < ratio <= 1.0
        ),
        use_shuffle=keys.flag("useshuffle", default.use_shuffle),
        pos_neg_ratio=keys.number(
            "posnegratio", default.pos_neg_ratio, "a number above 0, or -1", lambda ratio: ratio > 0.0 or ratio == -1.0
        ),
        trans_label=keys.choice(  # type: ignore[arg-type]
            "translabel", default.trans_label, get_args(LabelTransformation)
        ),
    )
    warnings += keys.unknown()
    return settings


def read_model(given: object, where: Where, warnings: list[str]) -> ModelSettings:
    """Read the section ``model``; add a warning for each unknown key."""
    keys, default = Keys(given, where), ModelSettings()
    settings = ModelSettings(
        model_type=keys.choice("modeltype", default.model_type, _MODEL_TYPES),
        model_size=keys.whole("modelsize", default.model_size, 1, off=-1),
        block_size=keys.whole("blockSize", default.block_size, 1),
        load_path=keys.text("loadpath", default.load_path),
        save_path=keys.text("savepath", default.save_path),
        init=keys.choice("init", default.init, get_args(InitialWay)),  # type: ignore[arg-type]
    )
    warnings += keys.unknown()
    return settings


def read_train(given: object, where: Where, warnings: list[str]) -> TrainSettings:
    """Read the section ``train``; add a warning for each unknown key."""
    keys, default = Keys(given, where), TrainSettings()
    decay = keys.choice("decayclass", default.decay_class, (*DECAYS, *DECAY_ALIASES))
    settings = TrainSettings(
        epoch=keys.whole("epoch", default.epoch, 1),
        num_update_per_epoch=keys.whole("numupdateperepoch", default.num_update_per_epoch, 1),
        batch_size=keys.whole("batchsize", default.batch_size, 1),
        lr=keys.number("lr", default.lr, "a number above 0", lambda rate: 0.0 < rate < math.inf),
        decay_class=DECAY_ALIASES.get(decay, decay),
        decay_alpha=keys.number("decayalpha", default.decay_alpha, "a number of 0 or more", lambda alpha: alpha >= 0.0),
        decay_beta=keys.number(
            "decaybeta", default.decay_beta, "a number from 0 to below 1", lambda beta: 0.0 <= beta < 1.0
        ),
    )
    warnings += keys.unknown()
    return settings


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
                f"expected a type of layer, given {given_type!r}{nearest(given_type, LAYER_KINDS)}"
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
        functions = self._transfer_functions(keys, len(dims))
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
                transfer_function=functions[number],
                weight_dim=weight_dims[number],
                part=number,
            )
            for number, name in enumerate(names)
        ]

    def _transfer_functions(self, keys: Keys, count: int) -> list[FunctionSettings]:
        if "transfuncs" not in keys:
            return [self.defaults.transfer_function] * count
        where = keys.place("transfuncs")
        functions = [
            read_function(given, TRANSFER_FUNCTIONS, place, self.warnings)
            for given, place in _items(keys.raw("transfuncs"), where, "transfer functions")
        ]
        _check_length(where, "one for each of outputdims", count, len(functions))
        return functions

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
