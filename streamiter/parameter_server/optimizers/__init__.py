"""How a gradient changes weights: update rules and learning rates, for learners and for the parameter server.

``optimizer`` defines an optimizer and the learning rates; ``rules`` has the update rules.
"""

from streamiter.parameter_server.optimizers.optimizer import (
    Constant,
    Correction,
    FloatArray,
    FloatView,
    Inverse,
    InverseSquareRoot,
    LearningRate,
    Optimizer,
    Slots,
    WarmRestarts,
    checked_optimizer,
    view_of,
)
from streamiter.parameter_server.optimizers.rules import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    GradientDescent,
    Momentum,
    RMSProp,
)

__all__ = [
    "FTRL",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "Constant",
    "Correction",
    "FloatArray",
    "FloatView",
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
