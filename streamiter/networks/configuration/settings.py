"""What a configuration file says, checked: the settings of data, model and training, and the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from streamiter.optimizers import Optimizer

__all__ = [
    "Configuration",
    "DataFormat",
    "DataSettings",
    "FunctionSettings",
    "InitialWay",
    "LabelTransformation",
    "LayerConfiguration",
    "ModelSettings",
    "TrainSettings",
]

DataFormat = Literal["libsvm", "dummy", "dense"]
LabelTransformation = Literal["NoTrans", "PosNegTrans", "ZeroOneTrans", "AddOneTrans", "SubOneTrans"]
InitialWay = Literal["xavier", "angel"]


@dataclass(frozen=True, slots=True)
class DataSettings:
    """``data``: which rows, and how they are read."""

    format: DataFormat = "dummy"
    """libsvm: indices from 1 with values; dummy: indices from 0 of ones; dense."""
    path: str | None = None
    index_range: int = -1
    """Features; −1: as many as the data has."""
    num_field: int = -1
    """Features that are there in each row; −1: not said."""
    validate_ratio: float = 0.05
    """Every ⌈1/ratio⌉-th row is for validation; 0: none."""
    sample_ratio: float = 1.0
    use_shuffle: bool = False
    pos_neg_ratio: float = -1.0
    """−1: off."""
    trans_label: LabelTransformation = "NoTrans"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """``model``: what the parameters are, and where a model is loaded from and saved to."""

    model_type: str = "T_FLOAT_DENSE"
    """``T_FLOAT_…``: float32, ``T_DOUBLE_…``: float64. The storage behind it is the parameter server's matter."""
    model_size: int = -1
    block_size: int = 1_000_000
    load_path: str | None = None
    save_path: str | None = None
    init: InitialWay = "xavier"
    """How weights begin; Angel's own way has a standard deviation of 1e-4, from which deep branches hardly learn."""

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Of all parameters, and of the arithmetic."""
        return "float64" if self.model_type.startswith("T_DOUBLE") else "float32"


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """``train``: how long, in which steps."""

    epoch: int = 30
    num_update_per_epoch: int = 10
    """A mini-batch has ⌈rows/num_update_per_epoch⌉ rows."""
    batch_size: int = 128
    """Rows at a time in prediction."""
    lr: float = 0.5
    decay_class: str = "StandardDecay"
    decay_alpha: float = 0.001
    decay_beta: float = 0.001


@dataclass(frozen=True, slots=True)
class FunctionSettings:
    """An optimizer, a transfer function or a loss: its type, and its parameters with their defaults filled in."""

    type: str
    """As Angel spells it: ``Momentum``, ``Relu``, ``LogLoss``."""
    parameters: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The type in lower case, as registries have it."""
        return self.type.lower()

    def __str__(self) -> str:
        """As people read it: what is 0 is left out.

        >>> print(FunctionSettings("Momentum", {"momentum": 0.9, "reg1": 0.0, "reg2": 0.001}))
        Momentum(momentum 0.9, reg2 0.001)
        """
        said = ", ".join(f"{name} {number:g}" for name, number in self.parameters.items() if number)
        return f"{self.type}({said})" if said else self.type


@dataclass(frozen=True, slots=True)
class LayerConfiguration:
    """One layer of the graph. Of a folded ``fclayer`` that is one of ``name_0``, ``name_1``, …, ``name``."""

    name: str
    type: str
    """As Angel spells it."""
    output_dim: int
    """Of a loss layer −1, as Angel has it, where the file gives none."""
    inputs: tuple[str, ...] = ()
    """Names of layers of the graph, in the order of the file."""
    num_factors: int | None = None
    weight_dim: int | None = None
    transfer_function: FunctionSettings | None = None
    loss: FunctionSettings | None = None
    optimizer_settings: FunctionSettings | None = None
    optimizer: Optimizer | None = None
    """Of a trainable layer, with the learning rate of the file."""
    declared: str = ""
    """The layer of the file that it comes from."""
    part: int | None = field(default=None, compare=False)
    """Which of its ``outputdims`` this is, for messages; None where it has ``outputdim``."""

    @property
    def key(self) -> str:
        """The type in lower case, as registries have it."""
        return self.type.lower()


@dataclass(frozen=True, slots=True)
class Configuration:
    """A whole file. Layers stand behind their inputs, the loss layer last, whatever their order in the file."""

    source: str
    """The file's name, for messages."""
    data: DataSettings
    model: ModelSettings
    train: TrainSettings
    layers: tuple[LayerConfiguration, ...]
    warnings: tuple[str, ...] = ()
    """One for each unknown key, and for what is most likely a mistake."""

    @property
    def features(self) -> int | None:
        """How many there are; None where the data has to say it."""
        return next((n for n in (self.data.index_range, self.model.model_size) if n > 0), None)

    @property
    def loss_layer(self) -> LayerConfiguration:
        """The one that all others lead to."""
        return self.layers[-1]
