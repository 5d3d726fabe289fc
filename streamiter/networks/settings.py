"""The settings of a configuration file: those of data, model and training, and the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

from streamiter.parameter_server.optimizers import (
    Constant,
    Correction,
    InverseSquareRoot,
    LearningRate,
    Optimizer,
    WarmRestarts,
)
from streamiter.values.settings import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    choice_of,
    flag_of,
    number_of,
    text_of,
    whole_of,
)


def _decay(value: Any) -> str:
    decay = choice_of(*LEARNING_RATES, "Constant", any_case=True)(value)
    return "ConstantLearningRate" if decay == "Constant" else str(decay)


_MODEL_TYPES: Final = [
    f"T_{number}_{storage}" for number in ("FLOAT", "DOUBLE") for storage in ("DENSE", "SPARSE", "SPARSE_LONGKEY")
]


DataFormat = Literal["libsvm", "dummy", "dense"]
LabelTransformation = Literal["NoTrans", "PosNegTrans", "ZeroOneTrans", "AddOneTrans", "SubOneTrans"]
InitialWay = Literal["xavier", "angel"]


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The section ``data``: the rows, and how they are read."""

    format: Annotated[DataFormat, choice_of(*get_args(DataFormat), any_case=True)] = "dummy"
    """``libsvm``: indices from 1, with values; ``dummy``: indices from 0, all values 1; ``dense``: all values."""
    path: Annotated[str | None, text_of] = None
    """The file or topic of the rows."""
    index_range: Annotated[int, whole_of(1, off=-1)] = -1
    """The number of features; −1: the number in the data."""
    num_field: Annotated[int, whole_of(1, off=-1)] = -1
    """The number of features in each row; −1: unknown."""
    validate_ratio: Annotated[float, FRACTION] = 0.05
    """Every ⌈1/ratio⌉-th row is for validation; 0: none."""
    sample_ratio: Annotated[float, number_of("a number above 0, of at most 1", lambda ratio: 0.0 < ratio <= 1.0)] = 1.0
    """Below 1: each mini-batch is a random sample of this share of the rows."""
    use_shuffle: Annotated[bool, flag_of] = False
    """Whether each epoch has another order of rows."""
    pos_neg_ratio: Annotated[float, number_of("a number above 0, or -1", lambda ratio: ratio > 0 or ratio == -1)] = -1.0
    """The ratio of positive rows to the others in an epoch; −1: all rows."""
    trans_label: Annotated[LabelTransformation, choice_of(*get_args(LabelTransformation), any_case=True)] = "NoTrans"
    """How labels are translated."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The section ``model``: the parameters, and the folders of saved models."""

    model_type: Annotated[str, choice_of(*_MODEL_TYPES, any_case=True)] = "T_FLOAT_DENSE"
    """``T_FLOAT_…``: float32, ``T_DOUBLE_…``: float64. ``…_SPARSE…``: features that do not occur take no memory."""
    model_size: Annotated[int, whole_of(1, off=-1)] = -1
    block_size: Annotated[int, whole_of(1)] = 1_000_000
    load_path: Annotated[str | None, text_of] = None
    save_path: Annotated[str | None, text_of] = None
    init: Annotated[InitialWay, choice_of(*get_args(InitialWay), any_case=True)] = "xavier"
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

    epoch: Annotated[int, whole_of(1)] = 30
    num_update_per_epoch: Annotated[int, whole_of(1)] = 10
    """A mini-batch has ⌈rows/num_update_per_epoch⌉ rows."""
    batch_size: Annotated[int, whole_of(1)] = 128
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
