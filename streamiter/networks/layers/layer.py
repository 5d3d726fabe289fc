"""What all layers have in common: inputs, consumers, and the state machine.

Null → Forward → Backward → Gradient → Update. Each step is done once, in the state before it; called again in the
state it leads to it gives what it gave; otherwise it is an error. A step asks the layers it needs to make theirs first.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from streamiter.errors import ConfigurationError, ModelError
from streamiter.networks.parameters import Array, Parameter
from streamiter.networks.status import Status

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.networks.transfer_functions.transfer_function import TransferFunction

__all__ = ["Layer", "StatusError"]


class StatusError(ModelError):
    """A step of a layer was called out of order."""


class Layer(abc.ABC):
    """One node of the graph; its output is (rows, ``output_dim``) in the dtype of the network.

    A layer implements ``_forward`` and ``_backward``, with parameters ``_gradients``, too. None of them changes the
    arrays it is given: another layer may read them.
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
