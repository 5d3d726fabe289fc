"""The fully connected layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from streamiter.networks.layers.checks import only_input, required_optimizer
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.sparse_products import column_sums
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.networks.transfer_functions.transfer_function import TransferFunction
    from streamiter.optimizers import Optimizer

__all__ = ["FCLayer"]


class FCLayer(Layer):
    """σ(xW + b)."""

    type_name: ClassVar[str] = "fclayer"

    def __init__(
        self, name: str, output_dim: int, source: Layer, transfer: TransferFunction, optimizer: Optimizer
    ) -> None:
        super().__init__(name, output_dim, [source])
        self.transfer = transfer
        fan_in = source.output_dim
        self._weight = Parameter(
            f"{name}.weight", (fan_in, output_dim), False, optimizer, "weight", fan_in, output_dim
        )
        self._bias = Parameter(f"{name}.bias", (output_dim,), False, optimizer, "zero", fan_in, output_dim)
        self.parameters = [self._weight, self._bias]

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> FCLayer:
        source = only_input(settings.name, inputs)
        return cls(
            settings.name,
            settings.output_dim,
            source,
            settings.transfer_function,
            required_optimizer(settings),
        )

    def _forward(self, inputs: list[Array]) -> Array:
        values = inputs[0] @ self._value(self._weight)
        values += self._value(self._bias)
        return self._transferred(values)

    def _backward(self, gradient: Array) -> list[Array]:
        self._inner = self._transferred_back(gradient)
        return [self._inner @ self._value(self._weight).T]

    def _gradients(self) -> None:
        self._weight.gradient = self.inputs[0].output.T @ self._inner
        self._bias.gradient = column_sums(self._inner)
