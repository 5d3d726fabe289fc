"""A fully connected layer that has the same weights for each vector of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from streamiter.errors import ConfigurationError
from streamiter.networks.layers.checks import only_input, required_optimizer
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.sparse_products import column_sums
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.networks.transfer_functions.transfer_function import TransferFunction
    from streamiter.optimizers import Optimizer

__all__ = ["ParamSharedFC"]


class ParamSharedFC(Layer):
    """σ of uW + b for each vector u of the input, all of them side by side: σ is taken over the whole row.

    With ``weight_dim`` 1 and a softmax these are the attention weights of an attention factorization machine (Xiao et
    al., 2017). The input has ``output_dim / weight_dim`` vectors.
    """

    type_name: ClassVar[str] = "paramsharedfc"

    def __init__(
        self,
        name: str,
        output_dim: int,
        weight_dim: int,
        source: Layer,
        transfer: TransferFunction,
        optimizer: Optimizer,
    ) -> None:
        super().__init__(name, output_dim, [source])
        self._width = _width_of_input(name, output_dim, weight_dim, source)
        self.transfer = transfer
        self.vector_width = weight_dim
        width = self._width
        self._weight = Parameter(
            f"{name}.weight", (width, weight_dim), False, optimizer, "weight", width, weight_dim
        )
        self._bias = Parameter(f"{name}.bias", (weight_dim,), False, optimizer, "zero", width, weight_dim)
        self.parameters = [self._weight, self._bias]

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> ParamSharedFC:
        if settings.weight_dim is None:
            raise ConfigurationError(
                f"layer {settings.name!r}: expected the key 'weightdim', given none; "
                "set it to the outputs for each vector"
            )
        source = only_input(settings.name, inputs)
        return cls(
            settings.name,
            settings.output_dim,
            settings.weight_dim,
            source,
            settings.transfer_function,
            required_optimizer(settings),
        )

    def _forward(self, inputs: list[Array]) -> Array:
        values = inputs[0].reshape(-1, self._width) @ self._value(self._weight)
        values += self._value(self._bias)
        return self._transferred(values.reshape(-1, self.output_dim))

    def _backward(self, gradient: Array) -> list[Array]:
        inner = self._transferred_back(gradient)
        self._inner = inner.reshape(-1, self._weight.shape[1])
        by_vector = self._inner @ self._value(self._weight).T
        return [by_vector.reshape(len(gradient), -1)]

    def _gradients(self) -> None:
        self._weight.gradient = self.inputs[0].output.reshape(-1, self._width).T @ self._inner
        self._bias.gradient = column_sums(self._inner)


def _width_of_input(name: str, output_dim: int, weight_dim: int, source: Layer) -> int:
    if weight_dim < 1 or output_dim < 1 or output_dim % weight_dim:
        raise ConfigurationError(
            f"layer {name!r}: expected outputdim as a multiple of weightdim ({weight_dim}), given {output_dim}; "
            "outputdim is weightdim × the number of vectors of its input"
        )
    count = output_dim // weight_dim
    width, rest = divmod(source.output_dim, count)
    if rest or source.vector_width not in (None, width):
        vectors = "" if source.vector_width is None else f" of vectors of {source.vector_width}"
        raise ConfigurationError(
            f"layer {name!r}: expected an input of {count} vectors (outputdim {output_dim} / weightdim {weight_dim}), "
            f"given {source.name!r} of outputdim {source.output_dim}{vectors}; change outputdim or weightdim"
        )
    return width
