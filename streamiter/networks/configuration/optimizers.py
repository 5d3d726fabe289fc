"""The optimizers and learning rates that settings stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from streamiter.networks.configuration.settings import FunctionSettings, TrainSettings
from streamiter.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    Adam,
    Constant,
    Correction,
    InverseSquareRoot,
    LearningRate,
    Momentum,
    Optimizer,
    RMSProp,
    WarmRestarts,
)

__all__ = ["DECAYS", "DECAY_ALIASES", "learning_rate", "optimizer"]

_LEARNING_RATES: Final[Mapping[str, Callable[[TrainSettings], LearningRate]]] = {
    "ConstantLearningRate": lambda train: Constant(train.lr),
    "StandardDecay": lambda train: InverseSquareRoot(train.lr, train.decay_alpha),
    "CorrectionDecay": lambda train: Correction(train.lr, train.decay_alpha, train.decay_beta),
    "WarmRestarts": lambda train: WarmRestarts(train.lr, train.decay_alpha),
}

DECAYS: Final = tuple(_LEARNING_RATES)
"""What ``decayclass`` may be, as Angel spells it."""

DECAY_ALIASES: Final = {"Constant": "ConstantLearningRate"}
"""Other spellings."""

# Angel's "AdaGrad" forgets old gradients, as RMSProp does.
_OPTIMIZERS: Final[Mapping[str, Callable[..., Optimizer]]] = {
    "SGD": SGD,
    "Momentum": Momentum,
    "AdaGrad": RMSProp,
    "AdaDelta": AdaDelta,
    "Adam": Adam,
    "FTRL": FTRL,
    # A step towards the mean of the rows that are nearest to a centre: the gradient of the k-means loss says so.
    "KmeansOptimizer": SGD,
}
_WITH_A_RATE_OF_ITS_OWN: Final = frozenset({"FTRL"})
_NAMES: Final = {"reg1": "l1", "reg2": "l2"}


def learning_rate(train: TrainSettings) -> LearningRate:
    """``lr`` and how it decays, by the number of the update."""
    return _LEARNING_RATES[train.decay_class](train)


def optimizer(settings: FunctionSettings, train: TrainSettings) -> Optimizer:
    """The rule itself. FTRL has a rate of its own, ``alpha``; all others go by ``lr``."""
    numbers = {_NAMES.get(name, name): number for name, number in settings.parameters.items()}
    rule = _OPTIMIZERS[settings.type]
    return (
        rule(**numbers) if settings.type in _WITH_A_RATE_OF_ITS_OWN else rule(learning_rate(train), **numbers)
    )
