"""How a gradient changes weights: update rules and learning rates, for learners and for the parameter server.

What all rules have in common is ``optimizer``; each has a file of its own.
"""

from streamiter.optimizers.adaptive import FTRL, AdaDelta, AdaGrad, Adam, RMSProp
from streamiter.optimizers.learning_rates import (
    Constant,
    Correction,
    Inverse,
    InverseSquareRoot,
    LearningRate,
    WarmRestarts,
)
from streamiter.optimizers.optimizer import (
    SGD,
    Floats,
    FloatView,
    GradientDescent,
    Momentum,
    Optimizer,
    Slots,
    checked_optimizer,
    view_of,
)

__all__ = [
    "FTRL",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "Constant",
    "Correction",
    "FloatView",
    "Floats",
    "GradientDescent",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "Slots",
    "WarmRestarts",
    "checked_optimizer",
    "view_of",
]
