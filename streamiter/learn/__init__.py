"""Learning on streams: the learners themselves, without any flow.

========================  ==============================================================================
``regression``            ``LinearRegression``, ``LogisticRegression``; what they share is in ``linear``
``optimizers``            ``SGD``, ``FTRL``, and ``learning_rates``
``features``, ``sparse``  ``FeatureHasher`` makes ``SparseRows`` of records
``validation``            ``ProgressiveValidation``: predict, then learn, then see what it was worth
``gradients``             ``Gradient``: what several workers add up for one step
``flights``               the example data of the demo
========================  ==============================================================================
"""

from streamiter.learn.checks import BadRows
from streamiter.learn.features import FeatureHasher
from streamiter.learn.gradients import Gradient
from streamiter.learn.learning_rates import Constant, Inverse, InverseSquareRoot, LearningRate
from streamiter.learn.linear import LinearModel
from streamiter.learn.optimizers import FTRL, SGD, Optimizer
from streamiter.learn.regression import LinearRegression, LogisticRegression
from streamiter.learn.sparse import SparseRows
from streamiter.learn.validation import ProgressiveValidation

__all__ = [
    "FTRL",
    "SGD",
    "BadRows",
    "Constant",
    "FeatureHasher",
    "Gradient",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "LinearModel",
    "LinearRegression",
    "LogisticRegression",
    "Optimizer",
    "ProgressiveValidation",
    "SparseRows",
]
