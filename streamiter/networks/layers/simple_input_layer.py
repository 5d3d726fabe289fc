"""σ(XW + b) on the features themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from streamiter.networks.layers.input_layer import InputLayer
from streamiter.networks.layers.sparse_products import column_sums, times, transposed_times
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.optimizers import Optimizer

__all__ = ["SimpleInputLayer"]


class SimpleInputLayer(InputLayer):
    """One weight for each feature and output; only those of the features in the mini-batch take part."""

    type_name: ClassVar[str] = "simpleinputlayer"

    def _begin(self, features: int, optimizer: Optimizer) -> list[Parameter]:
        name, outputs = self.name, self.output_dim
        self._weight = Parameter(
            f"{name}.weight", (features, outputs), True, optimizer, "weight", features, outputs
        )
        self._bias = Parameter(f"{name}.bias", (outputs,), False, optimizer, "zero", features, outputs)
        return [self._weight, self._bias]

    def _forward(self, inputs: list[Array]) -> Array:
        weight = self._value(self._weight)
        if self._place_holder.is_sparse:
            values = times(self._place_holder, weight)
        else:
            values = self._place_holder.dense_rows @ weight
        values += self._value(self._bias)
        return self._transferred(values)

    def _gradients(self) -> None:
        if self._place_holder.is_sparse:
            self._weight.gradient = transposed_times(self._place_holder, self._inner)
        else:
            self._weight.gradient = self._place_holder.dense_rows.T @ self._inner
        self._bias.gradient = column_sums(self._inner)
