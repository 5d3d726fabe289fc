"""Learning on streams: models, and flows that train them. What is public is imported from here.

A sub-package sees those below it, and none beside it:

=======================  ===============================================================================
``flights``              the example data of the demo
``regression``           ``LinearRegression``, ``LogisticRegression``: learn step by step, or ``fit``
``on_parameter_server``  linear models and k-means by workers that share parameters through a server
``online``               ``train_online``: linear models from a stream without end, delayed labels
``offline``              ``train_offline``: linear models from bounded data, round after round
``clustering``           k-means, offline and online
``trees``                ``DecisionTree``
``item_sets``            ``apriori``, association rules
``scaling``              mean and deviation of features, and rows in units of them
``validation``           ``ProgressiveValidation``: predict, then learn, then see what it was worth
``estimators``           what all ``fit`` methods share: arrays or a topic, progress, a Ctrl-C that keeps the model
``linear``               ``LinearModel``, losses, ``Gradient``: the arithmetic of the linear models
``features``             ``FeatureHasher``: from records with named fields to rows
``rows``                 ``Examples``, ``BadRows``: mini-batches, and what is refused of them
=======================  ===============================================================================
"""

from streamiter.learn.centroids import OnlineKMeans, online_k_means
from streamiter.learn.clustering import KMeans, k_means
from streamiter.learn.decision_tree import DecisionTree
from streamiter.learn.features import FeatureHasher, StandardScaler, online_standard_scaler, scaled
from streamiter.learn.item_sets import AssociationRule, ItemSet, apriori, association_rules
from streamiter.learn.linear import LinearModel
from streamiter.learn.linear_weights import Gradient
from streamiter.learn.offline import OfflineTraining, train_offline
from streamiter.learn.on_parameter_server.k_means import k_means_on_parameter_server
from streamiter.learn.on_parameter_server.training import ParameterServerTraining, train_on_parameter_server
from streamiter.learn.on_parameter_server.worker import ParameterServerWorker
from streamiter.learn.online import DelayedLabels, OnlineTraining, train_online
from streamiter.learn.regression import Fit, LinearRegression, LogisticRegression
from streamiter.learn.rows import BadRows, Examples
from streamiter.learn.validation import ProgressiveValidation
from streamiter.optimizers import (
    FTRL,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    Constant,
    Correction,
    GradientDescent,
    Inverse,
    InverseSquareRoot,
    LearningRate,
    Momentum,
    Optimizer,
    RMSProp,
    WarmRestarts,
)
from streamiter.sparse_rows import SparseRows

__all__ = [
    "FTRL",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AssociationRule",
    "BadRows",
    "Constant",
    "Correction",
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
    "Momentum",
    "OfflineTraining",
    "OnlineKMeans",
    "OnlineTraining",
    "Optimizer",
    "ParameterServerTraining",
    "ParameterServerWorker",
    "ProgressiveValidation",
    "RMSProp",
    "SparseRows",
    "StandardScaler",
    "WarmRestarts",
    "apriori",
    "association_rules",
    "k_means",
    "k_means_on_parameter_server",
    "online_k_means",
    "online_standard_scaler",
    "scaled",
    "train_offline",
    "train_on_parameter_server",
    "train_online",
]
