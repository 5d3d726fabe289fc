"""What layers have in common that compute with the features themselves."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from streamiter.networks.layers.checks import required_optimizer
from streamiter.networks.layers.layer import Layer
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.networks.transfer_functions.transfer_function import TransferFunction
    from streamiter.optimizers import Optimizer

__all__ = ["InputLayer"]


class InputLayer(Layer):
    """It has no inputs: it reads the mini-batch from the place holder. A layer implements ``_begin``, too."""

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
        self._place_holder = place_holder
        self.transfer = transfer
        self.parameters = self._begin(place_holder.feature_dimension, optimizer)

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> Self:
        return cls(
            settings.name,
            settings.output_dim,
            place_holder,
            settings.transfer_function,
            required_optimizer(settings),
        )

    @abc.abstractmethod
    def _begin(self, features: int, optimizer: Optimizer) -> list[Parameter]:
        """Its parameters, for so many features."""

    def _backward(self, gradient: Array) -> list[Array]:
        self._inner = self._transferred_back(gradient)
        return []
