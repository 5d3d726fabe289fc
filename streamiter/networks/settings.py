"""The settings of a configuration file, and how its objects are read: places for messages, and keys with their types.

``Configuration`` is the result: settings of data, model and training, and the layers. ``Where`` names a place in the
file, and ``Keys`` reads the keys of one JSON object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_type_hints

from streamiter.errors import ConfigurationError, did_you_mean
from streamiter.parameter_server.optimizers import (
    Constant,
    Correction,
    InverseSquareRoot,
    LearningRate,
    Optimizer,
    WarmRestarts,
)

_JSON_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a text"),
    (dict, "an object"),
    ((list, tuple), "an array"),
    (type(None), "null"),
)
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Where:
    """The place in a configuration file that a message names: a section, a layer, an object at a key.

    >>> str(Where("deepfm.json").layer("fclayer").key("outputdims"))
    "deepfm.json: layer 'fclayer', key 'outputdims'"
    """

    file: str
    part: str = ""
    path: str = ""
    """The key, with the keys above it: ``optimizer.momentum``."""

    def section(self, name: str) -> Where:
        """Return the place of a section, an object at the top of the file."""
        return Where(self.file, repr(name))

    def layer(self, name: str) -> Where:
        """Return the place of a layer."""
        return Where(self.file, f"layer {name!r}")

    def nameless_layer(self, number: int) -> Where:
        """Return the place of a layer without a name, by its number in the array, counted from 1."""
        return Where(self.file, f"layer number {number}")

    def key(self, name: str) -> Where:
        """Return the place of a key in this object."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> Where:
        """Return the place of an item in the array at this key, counted from 0 as in JSON paths."""
        return replace(self, path=f"{self.path}[{index}]")

    def error(self, text: str) -> ConfigurationError:
        """Return an error about this place."""
        return ConfigurationError(f"{self}: {text}")

    def wrong_kind(self, expected: str, given: object) -> ConfigurationError:
        """Return the error for a value of the wrong JSON type."""
        return self.error(f"expected {expected}, given {json_kind(given)}")

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.part, f"key {self.path!r}" if self.path else "")))
        return f"{self.file}: {place}" if place else self.file


def json_kind(given: object) -> str:
    """Return the JSON type of a value, and the value if it is short.

    >>> json_kind("8"), json_kind([1, 2]), json_kind(None), json_kind({"type": "relu"})
    ("the text '8'", 'the array [1, 2]', 'null', "the object {'type': 'relu'}")
    """
    kind = next((text for types, text in _JSON_KINDS if isinstance(given, types)), type(given).__name__)
    if given is None:
        return kind
    shown = str(given).lower() if isinstance(given, bool) else repr(given)
    if len(shown) > _LONGEST_SHOWN:
        return kind
    return shown if isinstance(given, (bool, int, float)) else f"the {kind.split()[-1]} {shown}"


def similar_names(given: str, known: Iterable[str]) -> str:
    """Return the same text, or a list of all known names if none is similar.

    >>> similar_names("x", ["wide", "deep"])
    "; there are 'wide', 'deep'"
    """
    names = list(known)
    there_are = f"; there are {', '.join(map(repr, names))}" if names else ""
    return did_you_mean(given, names) or there_are


_MISSING: Final = object()

# Many keys begin alike (decayalpha, decaybeta); only a key that is more similar is a likely typing error.
_LIKE_A_TYPING_ERROR: Final = 0.75


class Keys:
    """Reads the keys of one object of a configuration file, each with its type and its bounds.

    A key that is never read is unknown, and becomes a warning. Case does not count, because older files have keys such
    as ``blockSize`` and ``loadPath``. Two spellings of one key are an error.
    """

    def __init__(self, given: object, where: Where) -> None:
        if not isinstance(given, Mapping):
            raise where.wrong_kind("an object", given)
        self.where = where
        self._values: dict[str, tuple[str, object]] = {}
        self._asked: dict[str, None] = {}
        for spelled, value in given.items():
            if not isinstance(spelled, str):
                raise where.error(f"expected keys that are texts, given {spelled!r}")
            known = self._values.setdefault(spelled.lower(), (spelled, value))
            if known[0] != spelled:
                raise where.key(spelled).error(f"expected each key once, given {known[0]!r} and {spelled!r}; keep one")

    def __contains__(self, key: str) -> bool:
        return self._value(key) is not _MISSING

    def raw(self, key: str, default: object = None) -> object:
        """Return the value of a key, of any type."""
        value = self._value(key)
        return default if value is _MISSING else value

    def place(self, key: str) -> Where:
        """Return the place of a key, as the file spells it."""
        spelled, _ = self._values.get(key.lower(), (key, None))
        return self.where.key(spelled)

    def text(self, key: str, default: str | None) -> str | None:
        """Return a text that is not empty."""
        if key not in self:
            return default
        value = self.raw(key)
        if not isinstance(value, str) or not value:
            raise self.place(key).wrong_kind("a text that is not empty", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.place(key).wrong_kind("true or false", value)
        return value

    def whole(self, key: str, default: int, least: int, *, off: int | None = None) -> int:
        """Return a whole number of at least ``least``, or ``off``, the number for no value."""
        if key not in self:
            return default
        return self.whole_at(self.place(key), self.raw(key), least, off=off)

    @staticmethod
    def whole_at(where: Where, value: object, least: int, *, off: int | None = None) -> int:
        """Return the same for a value in an array."""
        if isinstance(value, int) and not isinstance(value, bool) and (value >= least or value == off):
            return value
        expected = f"a whole number of at least {least}"
        raise where.wrong_kind(expected if off is None else f"{expected}, or {off}", value)

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """Return one of the choices, which the file may spell in any case."""
        value, names = self.raw(key, default), list(choices)
        if not isinstance(value, str):
            raise self.place(key).wrong_kind(f"one of {', '.join(map(repr, names))}", value)
        for name in names:
            if name.lower() == value.lower():
                return name
        expected = f"expected one of {', '.join(map(repr, names))}, given {value!r}"
        raise self.place(key).error(expected + did_you_mean(value, names))

    def listed(self) -> str:
        """Return all keys in the spelling of the file, for messages."""
        return ", ".join(repr(spelled) for spelled, _ in self._values.values()) or "no keys"

    def unknown(self) -> list[str]:
        """Return a warning for each key that was not read."""
        return [self._unknown(spelled) for key, (spelled, _) in self._values.items() if key not in self._asked]

    def _unknown(self, spelled: str) -> str:
        meant = did_you_mean(spelled, self._asked, likeness=_LIKE_A_TYPING_ERROR)
        return f"{self.where.key(spelled)}: unknown, and left out{meant}"

    def _value(self, key: str) -> object:
        self._asked[key.lower()] = None
        return self._values.get(key.lower(), (key, _MISSING))[1]


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer can be too large for a float
        return math.inf


ReadSetting = Callable[[Keys, str, Any], Any]
"""Reads the value of a key, given its default."""


@dataclass(frozen=True, slots=True)
class FiniteNumber:
    """Reads a finite number that ``is_allowed``; ``expected`` describes such numbers in the error."""

    expected: str
    is_allowed: Callable[[float], bool]

    def __call__(self, keys: Keys, key: str, default: float) -> float:
        value = keys.raw(key, default)
        number = math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = _as_float(value)
        if math.isfinite(number) and self.is_allowed(number):
            return number
        raise keys.place(key).wrong_kind(self.expected, value)


FRACTION: Final = FiniteNumber("a number from 0 to below 1", lambda number: 0.0 <= number < 1.0)
POSITIVE: Final = FiniteNumber("a number above 0", lambda number: number > 0.0)
NOT_NEGATIVE: Final = FiniteNumber("a number of 0 or more", lambda number: number >= 0.0)


def _whole(least: int, *, off: int | None = None) -> ReadSetting:
    return lambda keys, key, default: keys.whole(key, default, least, off=off)


def _choice(choices: Sequence[str]) -> ReadSetting:
    return lambda keys, key, default: keys.choice(key, default, choices)


def _decay(keys: Keys, key: str, default: str) -> str:
    decay = keys.choice(key, default, (*LEARNING_RATES, "Constant"))
    return "ConstantLearningRate" if decay == "Constant" else decay


SectionT = TypeVar("SectionT", bound="DataSettings | ModelSettings | TrainSettings")


def read_section(section: type[SectionT], given: object, where: Where, warnings: list[str]) -> SectionT:
    """Read a section, whose keys are the names of its settings without underscores; warn of each unknown key."""
    keys, default = Keys(given, where), section()
    found = {
        name: hint.__metadata__[0](keys, name.replace("_", ""), getattr(default, name))
        for name, hint in get_type_hints(section, include_extras=True).items()
    }
    warnings += keys.unknown()
    return section(**found)


_MODEL_TYPES: Final = [
    f"T_{number}_{storage}" for number in ("FLOAT", "DOUBLE") for storage in ("DENSE", "SPARSE", "SPARSE_LONGKEY")
]


DataFormat = Literal["libsvm", "dummy", "dense"]
LabelTransformation = Literal["NoTrans", "PosNegTrans", "ZeroOneTrans", "AddOneTrans", "SubOneTrans"]
InitialWay = Literal["xavier", "angel"]


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The section ``data``: the rows, and how they are read."""

    format: Annotated[DataFormat, _choice(get_args(DataFormat))] = "dummy"
    """``libsvm``: indices from 1, with values; ``dummy``: indices from 0, all values 1; ``dense``: all values."""
    path: Annotated[str | None, Keys.text] = None
    """The file or topic of the rows."""
    index_range: Annotated[int, _whole(1, off=-1)] = -1
    """The number of features; −1: the number in the data."""
    num_field: Annotated[int, _whole(1, off=-1)] = -1
    """The number of features in each row; −1: unknown."""
    validate_ratio: Annotated[float, FRACTION] = 0.05
    """Every ⌈1/ratio⌉-th row is for validation; 0: none."""
    sample_ratio: Annotated[float, FiniteNumber("a number above 0, of at most 1", lambda ratio: 0.0 < ratio <= 1.0)] = (
        1.0
    )
    """Below 1: each mini-batch is a random sample of this share of the rows."""
    use_shuffle: Annotated[bool, Keys.flag] = False
    """Whether each epoch has another order of rows."""
    pos_neg_ratio: Annotated[
        float, FiniteNumber("a number above 0, or -1", lambda ratio: ratio > 0 or ratio == -1)
    ] = -1.0
    """The ratio of positive rows to the others in an epoch; −1: all rows."""
    trans_label: Annotated[LabelTransformation, _choice(get_args(LabelTransformation))] = "NoTrans"
    """How labels are translated."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The section ``model``: the parameters, and the folders of saved models."""

    model_type: Annotated[str, _choice(_MODEL_TYPES)] = "T_FLOAT_DENSE"
    """``T_FLOAT_…``: float32, ``T_DOUBLE_…``: float64. ``…_SPARSE…``: features that do not occur take no memory."""
    model_size: Annotated[int, _whole(1, off=-1)] = -1
    block_size: Annotated[int, _whole(1)] = 1_000_000
    load_path: Annotated[str | None, Keys.text] = None
    save_path: Annotated[str | None, Keys.text] = None
    init: Annotated[InitialWay, _choice(get_args(InitialWay))] = "xavier"
    """The initial weights; "angel" draws them with a standard deviation of 1e-4, so that deep networks hardly learn."""

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Return the dtype of all parameters and all arithmetic."""
        return "float64" if self.model_type.startswith("T_DOUBLE") else "float32"

    @property
    def is_sparse(self) -> bool:
        """Whether features that do not occur take no memory."""
        return "SPARSE" in self.model_type


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The section ``train``: epochs, mini-batches and the learning rate."""

    epoch: Annotated[int, _whole(1)] = 30
    num_update_per_epoch: Annotated[int, _whole(1)] = 10
    """A mini-batch has ⌈rows/num_update_per_epoch⌉ rows."""
    batch_size: Annotated[int, _whole(1)] = 128
    """The number of rows of a mini-batch in prediction."""
    lr: Annotated[float, POSITIVE] = 0.5
    decay_class: Annotated[str, _decay] = "StandardDecay"
    decay_alpha: Annotated[float, NOT_NEGATIVE] = 0.001
    decay_beta: Annotated[float, FRACTION] = 0.001

    @property
    def learning_rate(self) -> LearningRate:
        """Return the learning rate, which starts with ``lr`` and decays with the number of updates."""
        return LEARNING_RATES[self.decay_class](self)


LEARNING_RATES: Final[Mapping[str, Callable[[TrainSettings], LearningRate]]] = {
    "ConstantLearningRate": lambda train: Constant(train.lr),
    "StandardDecay": lambda train: InverseSquareRoot(train.lr, train.decay_alpha),
    "CorrectionDecay": lambda train: Correction(train.lr, train.decay_alpha, train.decay_beta),
    "WarmRestarts": lambda train: WarmRestarts(train.lr, train.decay_alpha),
}
"""The values of ``decayclass`` in Angel's spelling."""


@dataclass(frozen=True, slots=True)
class FunctionSettings:
    """An optimizer, a transfer function or a loss: its type, and its parameters with defaults filled in."""

    type: str
    """The type in Angel's spelling: ``Momentum``, ``Relu``, ``LogLoss``."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    make: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """The function's class."""

    def made(self) -> Any:
        """Return the function with these parameters."""
        assert self.make is not None
        return self.make(**self.parameters)

    def __str__(self) -> str:
        """Return type and parameters for people, without parameters that are 0.

        >>> print(FunctionSettings("Momentum", {"momentum": 0.9, "reg1": 0.0, "reg2": 0.001}))
        Momentum(momentum 0.9, reg2 0.001)
        """
        said = ", ".join(f"{name} {number:g}" for name, number in self.parameters.items() if number)
        return f"{self.type}({said})" if said else self.type


@dataclass(frozen=True, slots=True)
class LayerConfiguration:
    """One layer of the graph; a folded ``fclayer`` becomes the layers ``name_0``, ``name_1``, …, ``name``."""

    name: str
    type: str
    """The type in Angel's spelling."""
    output_dim: int
    """The output dimension; −1 for a loss layer whose file gives none, as in Angel."""
    inputs: tuple[str, ...] = ()
    """The names of the input layers, in the order of the file."""
    num_factors: int | None = None
    weight_dim: int | None = None
    transfer_function: FunctionSettings | None = None
    loss: FunctionSettings | None = None
    optimizer_settings: FunctionSettings | None = None
    optimizer: Optimizer | None = None
    """The optimizer of a layer with parameters, with the learning rate of the file."""
    declared: str = ""
    """The name of the layer in the file."""
    part: int | None = field(default=None, compare=False)
    """The place of this layer in ``outputdims``, for messages; None for a layer with ``outputdim``."""
    vector_width: int | None = field(default=None, compare=False)
    """The width of one vector if the output is several vectors, such as the output of an embedding."""

    def in_words(self) -> str:
        """Return what a definition has of the layer: all but the settings of its optimizer."""
        size = self.output_dim if self.num_factors is None else f"{self.output_dim} of {self.num_factors} factors"
        function = self.transfer_function or self.loss
        optimizer = "" if self.optimizer is None else f", {self.optimizer.name}"
        return f"{self.type} of {', '.join(self.inputs) or 'rows'} to {size}, {function}{optimizer}"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The content of a configuration file. Layers come after their inputs, the loss layer last."""

    source: str
    """The name of the file, for messages."""
    data: DataSettings
    model: ModelSettings
    train: TrainSettings
    layers: tuple[LayerConfiguration, ...]
    warnings: tuple[str, ...] = ()
    """A warning for each unknown key and each likely mistake."""

    @property
    def features(self) -> int | None:
        """Return the number of features; None if it depends on the data."""
        return next((n for n in (self.data.index_range, self.model.model_size) if n > 0), None)

    @property
    def loss_layer(self) -> LayerConfiguration:
        """Return the loss layer, which all other layers lead to."""
        return self.layers[-1]
