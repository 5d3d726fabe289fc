"""Optimizers, transfer functions and losses as a file names them: a name, or an object with ``type`` and parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamiter.networks.configuration.keys import Keys
from streamiter.networks.configuration.settings import FunctionSettings
from streamiter.networks.configuration.where import Where, nearest

__all__ = ["LOSSES", "OPTIMIZERS", "TRANSFER_FUNCTIONS", "FunctionKinds", "read_function"]


@dataclass(frozen=True, slots=True)
class _Number:
    """A parameter of a function: its default, and which numbers it may be."""

    default: float
    expected: str
    is_allowed: Callable[[float], bool]


def _fraction(default: float) -> _Number:
    return _Number(default, "a number from 0 to below 1", lambda number: 0.0 <= number < 1.0)


def _positive(default: float) -> _Number:
    return _Number(default, "a number above 0", lambda number: 0.0 < number < math.inf)


def _not_negative(default: float) -> _Number:
    return _Number(default, "a number of 0 or more", lambda number: 0.0 <= number < math.inf)


@dataclass(frozen=True, slots=True)
class FunctionKinds:
    """All functions for one purpose, as Angel spells them, with their parameters."""

    purpose: str
    """With its article, for messages."""
    kinds: Mapping[str, Mapping[str, _Number]]
    unsaid_when_0: frozenset[str] = frozenset()
    """Parameters of all kinds that the canonical form has only where they are not 0."""
    overruled: frozenset[str] = frozenset()
    """Keys of Angel's that say what the engine knows better."""

    def find(self, name: str) -> str | None:
        """How a type is spelled that is given in any case."""
        return next((known for known in self.kinds if known.lower() == name.lower()), None)


# Defaults are Angel's (docs/basic/optimizer_on_angel_en.md).
_REGULARIZATION: Final = {"reg1": _not_negative(0.0), "reg2": _not_negative(0.0)}

OPTIMIZERS: Final = FunctionKinds(
    "an optimizer",
    {
        "SGD": _REGULARIZATION,
        "Momentum": {"momentum": _fraction(0.9), **_REGULARIZATION},
        "AdaGrad": {"beta": _fraction(0.9), **_REGULARIZATION},
        "AdaDelta": {"alpha": _fraction(0.9), "beta": _fraction(0.9), **_REGULARIZATION},
        "Adam": {"beta": _fraction(0.9), "gamma": _fraction(0.99), **_REGULARIZATION},
        "FTRL": {"alpha": _positive(0.1), "beta": _not_negative(1.0), **_REGULARIZATION},
        "KmeansOptimizer": {},
    },
    unsaid_when_0=frozenset(_REGULARIZATION),
)

TRANSFER_FUNCTIONS: Final = FunctionKinds(
    "a transfer function",
    {
        "Identity": {},
        "Sigmoid": {},
        "Relu": {},
        "Tanh": {},
        "Softmax": {},
        "Dropout": {"proba": _fraction(0.5)},
        "SigmoidWithDropout": {"proba": _fraction(0.5)},
        "TanhWithDropout": {"proba": _fraction(0.5)},
    },
    # Whether this is training or prediction; the network knows.
    overruled=frozenset({"actiontype"}),
)

LOSSES: Final = FunctionKinds(
    "a loss function",
    {
        "L2Loss": {},
        "LogLoss": {},
        "HingeLoss": {},
        "CrossEntropyLoss": {},
        "SoftmaxLoss": {},
        "HuberLoss": {"delta": _positive(1.0)},
        "KmeansLoss": {},
    },
)


def read_function(given: Any, kinds: FunctionKinds, where: Where) -> tuple[FunctionSettings, list[str]]:
    """The function, with the defaults of its parameters filled in, and warnings about keys it does not have."""
    if isinstance(given, str):
        return FunctionSettings(spelled := _known(given, kinds, where), _defaults(kinds.kinds[spelled])), []
    if not isinstance(given, Mapping):
        raise where.wrong_kind(f"{kinds.purpose}: its name, or an object with 'type'", given)
    keys = Keys(given, where)
    if "type" not in keys:
        raise where.error(
            f"expected the key 'type', which names {kinds.purpose}, given {keys.listed()}; add it"
        )
    given_type = keys.raw("type")
    if not isinstance(given_type, str):
        raise keys.place("type").wrong_kind(f"the name of {kinds.purpose}", given_type)
    spelled = _known(given_type, kinds, keys.place("type"))
    for key in kinds.overruled:
        keys.raw(key)
    numbers = {
        name: keys.number(name, number.default, number.expected, number.is_allowed)
        for name, number in kinds.kinds[spelled].items()
    }
    return FunctionSettings(spelled, numbers), keys.unknown()


def _known(name: str, kinds: FunctionKinds, where: Where) -> str:
    spelled = kinds.find(name)
    if spelled is None:
        raise where.error(f"expected {kinds.purpose}, given {name!r}{nearest(name, kinds.kinds)}")
    return spelled


def _defaults(parameters: Mapping[str, _Number]) -> dict[str, float]:
    return {name: number.default for name, number in parameters.items()}
