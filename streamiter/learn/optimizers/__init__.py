"""How a gradient changes weights: update rules and learning rates. They import nothing else of the learners.

What all rules have in common is ``optimizer``; each has a file of its own.
"""

from streamiter.learn.optimizers.ftrl import FTRL
from streamiter.learn.optimizers.gradient_descent import GradientDescent
from streamiter.learn.optimizers.learning_rates import Constant, Inverse, InverseSquareRoot, LearningRate
from streamiter.learn.optimizers.optimizer import FloatView, Optimizer, Slots, checked_optimizer, view_of
from streamiter.learn.optimizers.sgd import SGD

__all__ = [
    "FTRL",
    "SGD",
    "Constant",
    "FloatView",
    "GradientDescent",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "Optimizer",
    "Slots",
    "checked_optimizer",
    "view_of",
]
