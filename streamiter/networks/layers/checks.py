"""Checks of the settings of layers against their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamiter.errors import ConfigurationError

if TYPE_CHECKING:
    from streamiter.networks.layers.layer import Layer
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.optimizers import Optimizer

__all__ = [
    "as_configured",
    "common_vector_width",
    "only_input",
    "required_optimizer",
    "same_dims",
    "vectors_of",
]


def required_optimizer(settings: LayerSettings) -> Optimizer:
    """The optimizer of a layer that learns."""
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
