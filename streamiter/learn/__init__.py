"""Learning on streams: the learners themselves, and online training as part of a flow.

========================  ==============================================================================
``regression``            ``LinearRegression``, ``LogisticRegression``; what they share is in ``linear``
``optimizers``            ``SGD``, ``FTRL``, and ``learning_rates``
``features``, ``sparse``  ``FeatureHasher`` makes ``SparseRows`` of records
``validation``            ``ProgressiveValidation``: predict, then learn, then see what it was worth
``gradients``             ``Gradient``: what several workers add up for one step
``training``              ``train_online``: a parameter owner and its workers in an unbounded iteration;
                          ``parameter_owner``, ``gradient_worker``, ``delayed_labels``, ``validate`` are its steps
``flights``               the example data of the demo
========================  ==============================================================================
"""

from streamiter.learn.checks import BadRows
from streamiter.learn.delayed_labels import DelayedLabels
from streamiter.learn.examples import Examples
from streamiter.learn.features import FeatureHasher
from streamiter.learn.gradients import Gradient
from streamiter.learn.learning_rates import Constant, Inverse, InverseSquareRoot, LearningRate
from streamiter.learn.linear import LinearModel
from streamiter.learn.optimizers import FTRL, SGD, Optimizer
from streamiter.learn.regression import LinearRegression, LogisticRegression
from streamiter.learn.sparse import SparseRows
from streamiter.learn.training import OnlineTraining, train_online
from streamiter.learn.validation import ProgressiveValidation

__all__ = [
    "FTRL",
    "SGD",
    "BadRows",
    "Constant",
    "DelayedLabels",
    "Examples",
    "FeatureHasher",
    "Gradient",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "LinearModel",
    "LinearRegression",
    "LogisticRegression",
    "OnlineTraining",
    "Optimizer",
    "ProgressiveValidation",
    "SparseRows",
    "train_online",
]
