"""How a gradient changes weights: update rules and learning rates, for learners and for the parameter server.

What all rules have in common is ``optimizer``; each has a file of its own.
"""

from streamiter.optimizers.adadelta import AdaDelta
from streamiter.optimizers.adagrad import AdaGrad, RMSProp
from streamiter.optimizers.adam import Adam
from streamiter.optimizers.ftrl import FTRL
from streamiter.optimizers.gradient_descent import GradientDescent
from streamiter.optimizers.learning_rates import (
    Constant,
    Correction,
    Inverse,
    InverseSquareRoot,
    LearningRate,
    WarmRestarts,
)
from streamiter.optimizers.momentum import Momentum
from streamiter.optimizers.optimizer import Floats, FloatView, Optimizer, Slots, checked_optimizer, view_of
from streamiter.optimizers.sgd import SGD

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
