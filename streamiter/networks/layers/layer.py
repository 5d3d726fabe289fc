"""What a layer is built from: the checked settings of one layer."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from streamiter.errors import ConfigurationError, ModelError
from streamiter.networks.losses import Diverged, NetworkLogLoss, NetworkLoss, Predictions
from streamiter.networks.parameters import Array, Parameter, Status
from streamiter.networks.transfer_functions import IdentityFunction, TransferFunction
from streamiter.optimizers import Optimizer

if TYPE_CHECKING:
    from streamiter.networks.mini_batches import PlaceHolder

__all__ = [
    "Joining",
    "Layer",
    "LayerSettings",
    "LossLayer",
    "SimpleLossLayer",
    "StatusError",
    "as_configured",
    "only_input",
    "required_optimizer",
    "same_dims",
    "vectors_of",
]


@dataclass(frozen=True)
class LayerSettings:
    """Those of one layer; a layer looks only at what its type needs.

    Layers that a file writes as one (``outputdims``) are several here.
    """

    name: str
    output_dim: int = -1
    """−1: what follows from the inputs, where it does."""
    transfer_function: TransferFunction = field(default_factory=IdentityFunction)
    optimizer: Optimizer | None = None
    """Of a layer that learns."""
    factors: int | None = None
    """``numfactors`` of an embedding."""
    weight_dim: int | None = None
    """``weightdim`` of a layer whose weights are shared by all vectors of its input."""
    loss: NetworkLoss = field(default_factory=NetworkLogLoss)


def required_optimizer(settings: LayerSettings) -> Optimizer:
    """The optimizer of a layer that learns.

    Checks of the settings of layers against their inputs.
    """
    if settings.optimizer is None:
        raise ConfigurationError(
            f"layer {settings.name!r}: expected an optimizer, given none; set 'optimizer'"
        )
    return settings.optimizer


def as_configured(name: str, given: int, follows: int, formula: str) -> int:
    """``follows``, which is what comes of the inputs; a file that says another number is wrong."""
    if given not in (follows, -1):
        raise ConfigurationError(
            f"layer {name!r}: expected outputdim {follows} ({formula}), given {given}; change outputdim, or its inputs"
        )
    return follows


def only_input(name: str, inputs: Sequence[Layer]) -> Layer:
    """The one input of a layer that has one."""
    if len(inputs) != 1:
        raise ConfigurationError(f"layer {name!r}: expected 1 input, given {len(inputs)}; set 'inputlayer'")
    return inputs[0]


def same_dims(name: str, inputs: Sequence[Layer]) -> int:
    """The output dimension that all inputs have."""
    dims = {layer.name: layer.output_dim for layer in inputs}
    if len(set(dims.values())) != 1:
        given = ", ".join(f"{of} {dim}" for of, dim in dims.items())
        raise ConfigurationError(
            f"layer {name!r}: expected inputs of one outputdim, given {given}; make them equal"
        )
    return inputs[0].output_dim


def vectors_of(name: str, source: Layer) -> tuple[int, int]:
    """How many vectors the output of ``source`` is made of, and how wide they are."""
    width = source.vector_width
    if width is None:
        raise ConfigurationError(
            f"layer {name!r}: expected an input that is made of vectors, as an embedding is, "
            f"given {source.name!r} ({source.type_name}); take an embedding as its input"
        )
    return source.output_dim // width, width


def common_vector_width(inputs: Sequence[Layer]) -> int | None:
    """The one that all inputs have; None where they have not."""
    widths = {layer.vector_width for layer in inputs}
    return widths.pop() if len(widths) == 1 else None


class StatusError(ModelError):
    """A step of a layer was called out of order."""


class Layer(abc.ABC):
    """One node of the graph; its output is (rows, ``output_dim``) in the dtype of the network.

    A layer implements ``_forward`` and ``_backward``, with parameters ``_gradients``, too. None of them changes the
    arrays it is given: another layer may read them.

    What all layers have in common: inputs, consumers, and the state machine.

    Null → Forward → Backward → Gradient → Update. Each step is done once, in the state before it; called again in the
    state it leads to it gives what it gave; otherwise it is an error. A step asks the layers it needs to make theirs
    first.
    """

    type_name: ClassVar[str]
    """As files have it, in lower case."""

    least_inputs: ClassVar[int] = 1
    most_inputs: ClassVar[int | None] = 1
    """None: as many as there are."""

    def __init__(self, name: str, output_dim: int, inputs: Sequence[Layer] = ()) -> None:
        self.name = name
        self.output_dim = output_dim
        self.inputs = list(inputs)
        self.consumers: list[Layer] = []
        self.parameters: list[Parameter] = []
        self.status = Status.NULL
        self.vector_width: int | None = None
        """Where the output is vectors one after the other, as of an embedding: how wide one is."""
        self.transfer: TransferFunction | None = None
        self.generator: np.random.Generator | None = None
        """What the transfer function draws from; None in prediction."""
        self._output: Array | None = None
        self._kept: Any = None
        self._input_gradients: list[Array] = []
        self._check_inputs()
        for layer in self.inputs:
            layer.consumers.append(self)

    @classmethod
    @abc.abstractmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> Layer:
        """The layer of these settings; ConfigurationError where they do not fit the inputs."""

    # ---- the steps

    def reset(self) -> None:
        """Nothing of the mini-batch is computed."""
        self.status = Status.NULL
        self._output = None
        self._input_gradients = []

    def cal_output(self) -> Array:
        """The output, of the outputs of the inputs."""
        if self._is_due("cal_output", Status.FORWARD):
            self._output = self._forward([layer.cal_output() for layer in self.inputs])
            self.status = Status.FORWARD
        return self.output

    def cal_backward(self) -> list[Array]:
        """For each input: the gradient of the loss by its output, as far as it comes through this layer."""
        if self._is_due("cal_backward", Status.BACKWARD):
            self._input_gradients = self._backward(self._gathered_gradient())
            self.status = Status.BACKWARD
        return self._input_gradients

    def cal_gradients(self) -> list[Parameter]:
        """The parameters, with the gradient of each."""
        if self._is_due("cal_gradients", Status.GRADIENT):
            self._gradients()
            self.status = Status.GRADIENT
        return self.parameters

    def update(self) -> None:
        """Note that the optimizer has made its step: it is not the layer that does."""
        if self._is_due("update", Status.UPDATE):
            self.status = Status.UPDATE

    @property
    def output(self) -> Array:
        """What was computed last, of this mini-batch."""
        if self._output is None:
            raise StatusError(
                f"layer {self.name!r}: expected status Forward or later, given {self.status}; call cal_output first"
            )
        return self._output

    # ---- what a layer is

    @abc.abstractmethod
    def _forward(self, inputs: list[Array]) -> Array:
        """The output, of the outputs of the inputs."""

    @abc.abstractmethod
    def _backward(self, gradient: Array) -> list[Array]:
        """For each input the gradient by it, of the gradient by the output."""

    def _gradients(self) -> None:
        """Set the gradient of each parameter."""
        assert not self.parameters

    # ---- the state machine

    def _is_due(self, step: str, leads_to: Status) -> bool:
        """Whether it is to be done now; not where it has been."""
        needed = Status(leads_to - 1)
        if self.status == needed:
            return True
        if self.status == leads_to:
            return False
        raise StatusError(
            f"layer {self.name!r}: expected status {needed} for {step}, given {self.status}; "
            "the steps are feed_data, cal_output, cal_backward, cal_gradients, update"
        )

    def _gathered_gradient(self) -> Array:
        """The gradient by the output: the sum over all consumers."""
        if not self.consumers:
            raise ModelError(
                f"layer {self.name!r}: expected a layer that takes its output, given none; connect it to the loss layer"
            )
        parts = [part for consumer in dict.fromkeys(self.consumers) for part in consumer._gradients_for(self)]
        if len(parts) == 1:
            return parts[0]
        total: Array = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total

    def _gradients_for(self, layer: Layer) -> list[Array]:
        """Once for each time it is among the inputs."""
        gradients = self.cal_backward()
        return [gradient for source, gradient in zip(self.inputs, gradients, strict=True) if source is layer]

    # ---- checks

    def _check_inputs(self) -> None:
        given, least, most = len(self.inputs), self.least_inputs, self.most_inputs
        if least <= given and (most is None or given <= most):
            return
        if most == least:
            expected = f"{least} input{'' if least == 1 else 's'}"
        else:
            expected = f"at least {least} inputs" if most is None else f"{least} to {most} inputs"
        raise ConfigurationError(
            f"layer {self.name!r} ({self.type_name}): expected {expected}, given {given}"
        )

    def _transferred(self, values: Array) -> Array:
        """The transfer function of what the layer has computed, which it may write to."""
        assert self.transfer is not None
        output, self._kept = self.transfer.forward(values, self.generator)
        return output

    def _transferred_back(self, gradient: Array) -> Array:
        """The gradient by what the transfer function was given."""
        assert self.transfer is not None
        return self.transfer.backward(self._kept, gradient)

    def _value(self, parameter: Parameter) -> Array:
        """What was set for the mini-batch at hand."""
        if parameter.values is None:
            raise ModelError(
                f"layer {self.name!r}: expected values of {parameter.name!r}, given none; "
                "set those of the mini-batch before cal_output"
            )
        return parameter.values

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, output_dim={self.output_dim}, status={self.status})"


class Joining(Layer):
    """Vectors of one width, joined, are vectors of that width.

    What layers have in common that join several inputs, and learn nothing themselves.
    """

    least_inputs: ClassVar[int] = 2
    most_inputs: ClassVar[int | None] = None

    def __init__(self, name: str, output_dim: int, inputs: Sequence[Layer]) -> None:
        super().__init__(name, output_dim, inputs)
        self.vector_width = common_vector_width(inputs)

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> Self:
        dim, formula = cls.dim_of(settings.name, inputs)
        return cls(settings.name, as_configured(settings.name, settings.output_dim, dim, formula), inputs)

    @staticmethod
    def dim_of(name: str, inputs: Sequence[Layer]) -> tuple[int, str]:
        """The output dimension of a layer of this name, and what it is."""
        return same_dims(name, inputs), "that of its inputs"


class LossLayer(Layer):
    """Its output is that of its input, the scores; the mean of the loss over the batch is what all gradients are of.

    Where the graph ends.
    """

    type_name: ClassVar[str] = "losslayer"

    def __init__(self, name: str, source: Layer, loss: NetworkLoss, place_holder: PlaceHolder) -> None:
        super().__init__(name, source.output_dim, [source])
        loss.check_outputs(f"layer {name!r}", source.output_dim)
        self.loss = loss
        self._place_holder = place_holder

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> LossLayer:
        source = only_input(settings.name, inputs)
        return cls(settings.name, source, settings.loss, place_holder)

    def check_labels(self) -> None:
        """``BadRows`` for labels that the loss does not know."""
        if self._place_holder.labels is not None and self.loss.needs_labels:
            self.loss.check_labels(f"layer {self.name!r}", self._place_holder.labels, self.output_dim)

    def mean_loss(self) -> float:
        """The mean over the batch. Raises ModelError without labels, ``Diverged`` where it is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            mean = self.loss.mean(self.scores(), self._labels())
        if not np.isfinite(mean):
            raise Diverged(f"layer {self.name!r}: expected a finite loss, given {mean}")
        return mean

    def scores(self) -> Array:
        """The scores, whatever steps came after them."""
        return self.cal_output() if self._output is None else self._output

    def predictions(self) -> Predictions:
        """What the loss makes of the scores."""
        return self.loss.predictions(self.scores())

    def _forward(self, inputs: list[Array]) -> Array:
        return inputs[0]

    def _gathered_gradient(self) -> Array:
        return self.loss.gradient(self.output, self._labels())

    def _backward(self, gradient: Array) -> list[Array]:
        return [gradient]

    def _labels(self) -> Array:
        if not self.loss.needs_labels:
            return np.zeros(self._place_holder.batch_size, dtype=self._place_holder.dtype)
        if self._place_holder.labels is None:
            raise ModelError(
                f"layer {self.name!r}: expected labels for the loss, given none; feed the mini-batch with labels"
            )
        return self._place_holder.labels


class SimpleLossLayer(LossLayer):
    """The same; files have both names."""

    type_name: ClassVar[str] = "simplelosslayer"
