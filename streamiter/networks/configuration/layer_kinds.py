"""The types of layers that a file may name, and the keys that each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ALIASES", "LAYER_KINDS", "LayerKind", "find_kind"]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The keys of a type beside ``name`` and ``type``."""

    inputs: Literal["none", "one", "many"] = "one"
    """none: reads the mini-batch; one: ``inputlayer``; many: ``inputlayers``."""
    least_inputs: int = 1
    most_inputs: int | None = None
    folded: bool = False
    """Has ``outputdims`` and ``transfuncs``, and stands for as many layers."""
    has_transfer_function: bool = False
    is_trainable: bool = False
    has_factors: bool = False
    has_weight_dims: bool = False
    default_dim: int | None = None
    """Its output dimension where the file gives none; None: it must."""
    is_loss: bool = False


_JOIN: Final = LayerKind(inputs="many", least_inputs=2)
_LOSS: Final = LayerKind(is_loss=True)

LAYER_KINDS: Final[Mapping[str, LayerKind]] = {
    "SimpleInputLayer": LayerKind(inputs="none", has_transfer_function=True, is_trainable=True),
    "Embedding": LayerKind(inputs="none", has_factors=True, is_trainable=True),
    "KmeansInputLayer": LayerKind(inputs="none", has_transfer_function=True, is_trainable=True),
    "FCLayer": LayerKind(folded=True, has_transfer_function=True, is_trainable=True),
    "ParamSharedFC": LayerKind(
        folded=True, has_transfer_function=True, is_trainable=True, has_weight_dims=True
    ),
    "BiInnerSumCross": LayerKind(default_dim=1),
    "BiInnerCross": LayerKind(),
    "BiInteractionCross": LayerKind(),
    "BiInteractionCrossTiled": LayerKind(),
    "BiOuterCross": LayerKind(),
    "ConcatLayer": LayerKind(inputs="many"),
    "SumPooling": _JOIN,
    "MulPooling": _JOIN,
    "DotPooling": _JOIN,
    "CrossLayer": LayerKind(inputs="many", least_inputs=2, most_inputs=2, is_trainable=True),
    "WeightedSumLayer": LayerKind(inputs="many", least_inputs=2, most_inputs=2),
    "SimpleLossLayer": _LOSS,
    "LossLayer": _LOSS,
}
"""By type, as Angel spells it."""

ALIASES: Final = {"biouttercross": "BiOuterCross"}
"""Other spellings, in lower case."""


def find_kind(name: str) -> str | None:
    """How a type is spelled that is given in any case, or in another spelling."""
    lower = name.lower()
    return ALIASES.get(lower) or next((known for known in LAYER_KINDS if known.lower() == lower), None)
