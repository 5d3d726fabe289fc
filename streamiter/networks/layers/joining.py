"""What layers have in common that join several inputs, and learn nothing themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from streamiter.networks.layers.checks import as_configured, common_vector_width, same_dims
from streamiter.networks.layers.layer import Layer

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder

__all__ = ["Joining"]


class Joining(Layer):
    """Vectors of one width, joined, are vectors of that width."""

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
