"""Learning on streams: the learners themselves, and online training as part of a flow.

========================  ==============================================================================
``regression``            ``LinearRegression``, ``LogisticRegression``; what they share is in ``linear``
``optimizers``            ``SGD``, ``FTRL``, and ``learning_rates``
``features``, ``sparse``  ``FeatureHasher`` makes ``SparseRows`` of records
``validation``            ``ProgressiveValidation``: predict, then learn, then see what it was worth
``gradients``             ``Gradient``: what several workers add up for one step
``training``              ``train_online``: a parameter owner and its workers in an unbounded iteration;
                          ``parameter_owner``, ``gradient_worker``, ``delayed_labels``, ``validate`` are its steps
``apriori``               ``apriori``: frequent item sets, a bounded iteration; ``association_rules`` of them
``decision_tree``         ``DecisionTree``; its parts are in ``trees``
``k_means``               ``k_means``, and ``KMeans`` around it; the arithmetic is in ``clusters``
``online_k_means``        ``online_k_means``: centroids that follow a stream and forget
``online_scaler``         ``online_standard_scaler``: mean and deviation of each feature so far
``offline_training``      ``train_offline``: the same in a bounded iteration, round after round over all examples;
                          ``offline_owner``, ``offline_worker``, ``example_blocks`` are its steps
``fitting``, ``offline``  ``fit`` of the models, and how a flow is run that learns offline: progress, Ctrl-C
``flights``               the example data of the demo
========================  ==============================================================================
"""

from streamiter.learn.apriori import ItemSet, apriori
from streamiter.learn.association_rules import AssociationRule, association_rules
from streamiter.learn.checks import BadRows
from streamiter.learn.decision_tree import DecisionTree
from streamiter.learn.delayed_labels import DelayedLabels
from streamiter.learn.examples import Examples
from streamiter.learn.features import FeatureHasher
from streamiter.learn.fitting import Fit
from streamiter.learn.gradients import Gradient
from streamiter.learn.k_means import k_means
from streamiter.learn.k_means_estimator import KMeans
from streamiter.learn.learning_rates import Constant, Inverse, InverseSquareRoot, LearningRate
from streamiter.learn.linear import LinearModel
from streamiter.learn.offline_training import OfflineTraining, train_offline
from streamiter.learn.online_k_means import OnlineKMeans, online_k_means
from streamiter.learn.online_scaler import StandardScaler, online_standard_scaler, scaled
from streamiter.learn.optimizers import FTRL, SGD, GradientDescent, Optimizer
from streamiter.learn.regression import LinearRegression, LogisticRegression
from streamiter.learn.sparse import SparseRows
from streamiter.learn.training import OnlineTraining, train_online
from streamiter.learn.validation import ProgressiveValidation

__all__ = [
    "FTRL",
    "SGD",
    "AssociationRule",
    "BadRows",
    "Constant",
    "DecisionTree",
    "DelayedLabels",
    "Examples",
    "FeatureHasher",
    "Fit",
    "Gradient",
    "GradientDescent",
    "Inverse",
    "InverseSquareRoot",
    "ItemSet",
    "KMeans",
    "LearningRate",
    "LinearModel",
    "LinearRegression",
    "LogisticRegression",
    "OfflineTraining",
    "OnlineKMeans",
    "OnlineTraining",
    "Optimizer",
    "ProgressiveValidation",
    "SparseRows",
    "StandardScaler",
    "apriori",
    "association_rules",
    "k_means",
    "online_k_means",
    "online_standard_scaler",
    "scaled",
    "train_offline",
    "train_online",
]
