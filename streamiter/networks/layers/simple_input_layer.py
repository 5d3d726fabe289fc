"""σ(XW + b) on the features themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from streamiter.networks.layers.checks import required_optimizer
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.sparse_products import column_sums, times, transposed_times
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.networks.transfer_functions.transfer_function import TransferFunction
    from streamiter.optimizers import Optimizer

__all__ = ["SimpleInputLayer"]


class SimpleInputLayer(Layer):
    """One weight for each feature and output; only those of the features in the mini-batch take part."""

    type_name: ClassVar[str] = "simpleinputlayer"
    least_inputs: ClassVar[int] = 0
    most_inputs: ClassVar[int | None] = 0

    def __init__(
        self,
        name: str,
        output_dim: int,
        place_holder: PlaceHolder,
        transfer: TransferFunction,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(name, output_dim)
        features = place_holder.feature_dimension
        self._place_holder = place_holder
        self.transfer = transfer
        self._weight = Parameter(
            f"{name}.weight", (features, output_dim), True, optimizer, "weight", features, output_dim
        )
        self._bias = Parameter(f"{name}.bias", (output_dim,), False, optimizer, "zero", features, output_dim)
        self.parameters = [self._weight, self._bias]

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> SimpleInputLayer:
        return cls(
            settings.name,
            settings.output_dim,
            place_holder,
            settings.transfer_function,
            required_optimizer(settings),
        )

    def _forward(self, inputs: list[Array]) -> Array:
        weight = self._value(self._weight)
        if self._place_holder.is_sparse:
            values = times(self._place_holder, weight)
        else:
            values = self._place_holder.dense_rows @ weight
        values += self._value(self._bias)
        return self._transferred(values)

    def _backward(self, gradient: Array) -> list[Array]:
        self._inner = self._transferred_back(gradient)
        return []

    def _gradients(self) -> None:
        if self._place_holder.is_sparse:
            self._weight.gradient = transposed_times(self._place_holder, self._inner)
        else:
            self._weight.gradient = self._place_holder.dense_rows.T @ self._inner
        self._bias.gradient = column_sums(self._inner)
