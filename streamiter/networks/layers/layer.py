"""The base of all layers: parameters, settings, the state machine, and the loss layer.

A layer computes its output from the outputs of its inputs, and on the way back the gradients by its inputs and its
parameters. ``initial_values`` are the values of a parameter before training.
"""

from __future__ import annotations

import abc
import enum
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.networks.data import PlaceHolder
from streamiter.networks.functions import NetworkLoss, Predictions, TransferFunction
from streamiter.networks.settings import LayerConfiguration
from streamiter.parameter_server.optimizers import Optimizer
from streamiter.values.numbers import Array, whole_number

Initial = Literal["weight", "zero"]
"""The initial values of a parameter: drawn for weights, zeros for biases."""


@dataclass(eq=False)
class Parameter:
    """One array of one layer. ``values`` and ``gradient`` belong to the current mini-batch.

    ``shape`` is the whole shape. The first axis of a parameter ``by_feature`` counts features; its ``values`` and
    ``gradient`` have one row for each feature of the mini-batch, in the order of ``PlaceHolder.indices``.
    """

    name: str
    """The name of the layer and of the array: ``layer.weight``, ``layer.bias``."""
    shape: tuple[int, ...]
    by_feature: bool
    optimizer: Optimizer
    initial: Initial
    fan_in: int
    """The number of inputs of one output."""
    fan_out: int
    values: Array | None = None
    gradient: Array | None = None

    @property
    def size(self) -> int:
        """Return the number of numbers in the array."""
        return math.prod(self.shape)


class Status(enum.IntEnum):
    """The progress of a layer with its mini-batch; a new mini-batch sets it to ``NULL``.

    >>> Status.FORWARD < Status.BACKWARD, str(Status.NULL)
    (True, 'Null')
    """

    NULL = 0
    """Nothing is computed yet."""
    FORWARD = 1
    """The output is computed."""
    BACKWARD = 2
    """The gradients of the inputs are computed."""
    GRADIENT = 3
    """The gradients of the parameters are computed, too."""
    UPDATE = 4
    """The optimizer has made its step."""

    def __str__(self) -> str:
        return self.name.capitalize()


class StatusError(ModelError):
    """A step of a layer was called out of order."""


class Layer(abc.ABC):
    """One node of the graph; its output has the shape (rows, ``output_dim``) and the dtype of the network.

    A layer type implements ``_forward`` and ``_backward``, and with parameters ``_gradients``. None of them changes its
    arguments: another layer may read them. The configuration has checked that settings and inputs fit.

    The status of a layer is Null → Forward → Backward → Gradient → Update. A step is done once, in the status before
    it; a second call returns the same result; any other call is an error. A step first calls the same step of the
    layers that it depends on.
    """

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        self.name = settings.name
        self.output_dim = settings.output_dim
        self.inputs = list(inputs)
        self.consumers: list[Layer] = []
        self.parameters: list[Parameter] = []
        self.status = Status.NULL
        self.vector_width = settings.vector_width
        function = settings.transfer_function
        self.transfer: TransferFunction | None = None if function is None else function.made()
        self.generator: np.random.Generator | None = None
        """The random generator of the transfer function; None in prediction."""
        self._output: Array | None = None
        self._input_gradients: list[Array] = []
        self._optimizer = settings.optimizer
        self._place_holder = place_holder
        for layer in self.inputs:
            layer.consumers.append(self)

    # -- the steps

    def reset(self) -> None:
        """Start a mini-batch, of which nothing is computed."""
        self.status = Status.NULL
        self._output = None
        self._input_gradients = []

    def cal_output(self) -> Array:
        """Compute the output from the outputs of the inputs."""
        if self._is_due("cal_output", Status.FORWARD):
            self._output = self._forward([layer.cal_output() for layer in self.inputs])
            self.status = Status.FORWARD
        return self.output

    def cal_backward(self) -> list[Array]:
        """Compute for each input the gradient of the loss by its output, as far as it passes this layer."""
        if self._is_due("cal_backward", Status.BACKWARD):
            self._input_gradients = self._backward(self._gathered_gradient())
            self.status = Status.BACKWARD
        return self._input_gradients

    def cal_gradients(self) -> list[Parameter]:
        """Compute the gradients of the parameters, and return the parameters."""
        if self._is_due("cal_gradients", Status.GRADIENT):
            self._gradients()
            self.status = Status.GRADIENT
        return self.parameters

    def update(self) -> None:
        """Note that the optimizer has made its step."""
        if self._is_due("update", Status.UPDATE):
            self.status = Status.UPDATE

    @property
    def output(self) -> Array:
        """Return the output for the current mini-batch."""
        if self._output is None:
            raise StatusError(
                f"layer {self.name!r}: expected status Forward or later, given {self.status}; call cal_output first"
            )
        return self._output

    # -- what a layer type implements

    @abc.abstractmethod
    def _forward(self, inputs: list[Array]) -> Array:
        """Return the output from the outputs of the inputs."""

    @abc.abstractmethod
    def _backward(self, gradient: Array) -> list[Array]:
        """Return the gradient by each input from the gradient by the output."""

    def _gradients(self) -> None:
        """Set the gradient of each parameter."""
        assert not self.parameters

    # -- the state machine

    def _is_due(self, step: str, leads_to: Status) -> bool:
        """Whether the step must be done now; False if it was done already."""
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
        """Return the gradient by the output, which is the sum over all consumers."""
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
        """Return a gradient for each time that the layer is an input."""
        gradients = self.cal_backward()
        return [gradient for source, gradient in zip(self.inputs, gradients, strict=True) if source is layer]

    # -- checks and helpers

    def _parameter(
        self,
        what: str,
        shape: tuple[int, ...],
        fan_in: int,
        fan_out: int,
        *,
        initial: Initial = "weight",
        by_feature: bool = False,
    ) -> Parameter:
        """Make a parameter of the layer."""
        assert self._optimizer is not None
        made = Parameter(f"{self.name}.{what}", shape, by_feature, self._optimizer, initial, fan_in, fan_out)
        self.parameters.append(made)
        return made

    def _add_weight_and_bias(
        self, weight: tuple[int, ...], outputs: int, fan_in: int, fan_out: int, *, by_feature: bool = False
    ) -> None:
        self._weight = self._parameter("weight", weight, fan_in, fan_out, by_feature=by_feature)
        self._bias = self._parameter("bias", (outputs,), fan_in, fan_out, initial="zero")

    def _transferred(self, values: Array) -> Array:
        """Apply the transfer function to the computed values, which may be overwritten."""
        assert self.transfer is not None
        self._applied = self.transfer.forward(values, self.generator)
        return self._applied.output

    def _transferred_back(self, gradient: Array) -> Array:
        """Return the gradient by the input of the transfer function."""
        return self._applied.backward(gradient)

    def _value(self, parameter: Parameter) -> Array:
        """Return the values that were set for the current mini-batch; ``LayerGraph`` has checked them."""
        assert parameter.values is not None
        return parameter.values

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, output_dim={self.output_dim}, status={self.status})"


class LossLayer(Layer):
    """The end of the graph. Its output is the scores of its input; all gradients are gradients of the mean loss."""

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        super().__init__(settings, inputs, place_holder)
        self.output_dim = inputs[0].output_dim
        assert settings.loss is not None
        self.loss: NetworkLoss = settings.loss.made()

    def check_labels(self) -> None:
        """Raise ``BadRows`` for labels that the loss does not know."""
        if self._place_holder.labels is not None and self.loss.needs_labels:
            self.loss.check_labels(f"layer {self.name!r}", self._place_holder.labels, self.output_dim)

    def mean_loss(self) -> float:
        """Return the mean loss of the batch, which may be infinite or NaN. Raises ModelError without labels."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.loss.mean(self.scores(), self._labels())

    def scores(self) -> Array:
        """Return the scores, in any status after they are computed."""
        return self.cal_output() if self._output is None else self._output

    def predictions(self) -> Predictions:
        """Return the predictions of the loss for the scores."""
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


# The standard deviation of Angel's RandomNormal, whose mean is 0.
ANGEL_DEVIATION: Final = 1e-4


def initial_values(parameter: Parameter, *, seed: int, way: str = "xavier", dtype: npt.DTypeLike = "float32") -> Array:
    """Return the initial array of a parameter, in its whole shape.

    ``way`` is "xavier" (Glorot and Bengio 2010): uniform in ±√(6/(fan_in + fan_out)); or "angel": normal with a
    standard deviation of 1e-4, with which deep networks learn almost nothing. Biases are zeros in both. The numbers
    are drawn in float64 from a random stream of the parameter's own, which depends on ``seed`` and its name; so neither
    the order of the parameters nor the dtype changes them. float32 has the same numbers, rounded.

    >>> from streamiter.parameter_server.optimizers import SGD
    >>> weight = Parameter("wide.weight", (2, 1), True, SGD(), "weight", fan_in=2, fan_out=1)
    >>> values = initial_values(weight, seed=7)
    >>> values.shape, values.dtype.name, bool(abs(values).max() <= 2**0.5)
    ((2, 1), 'float32', True)
    """
    if parameter.initial == "zero":
        return np.zeros(parameter.shape, dtype=dtype)
    draw = _WAYS[way]
    return draw(_stream(seed, parameter.name), parameter).astype(dtype, copy=False)


def _stream(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of a name; Python's own hash of a text differs between processes."""
    digest = hashlib.sha256(name.encode()).digest()
    words = [int.from_bytes(digest[start : start + 4], "little") for start in range(0, len(digest), 4)]
    return np.random.Generator(np.random.PCG64([whole_number("seed", seed, 0), *words]))


def xavier_limit(parameter: Parameter) -> float:
    """Return the largest number of Xavier's initial values."""
    return math.sqrt(6.0 / (parameter.fan_in + parameter.fan_out))


def _xavier(stream: np.random.Generator, parameter: Parameter) -> npt.NDArray[np.float64]:
    limit = xavier_limit(parameter)
    return stream.uniform(-limit, limit, parameter.shape)


_WAYS: Final[Mapping[str, Callable[[np.random.Generator, Parameter], npt.NDArray[np.float64]]]] = {
    "xavier": _xavier,
    "angel": lambda stream, parameter: stream.normal(0.0, ANGEL_DEVIATION, parameter.shape),
}
