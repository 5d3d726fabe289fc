"""Learning on streams: models, and flows that train them. All public names are imported from here.

Each room or module imports only from those in the rows below it:

========================  ==============================================================================
``flights``               the data of the demo: flights, and their labels
``scikit_learn``          ``OnlineClassifier``, ``OnlineRegressor``; imported when they are used
``on_parameter_server``   linear models and k-means, trained on a parameter server
``server_training``       training on a parameter server, for any model
``clusters/``             k-means on bounded data and on streams
``trees/``                ``DecisionTree``, which grows in a loop
``item_sets``             ``apriori``
``negatives``             ``sampled_negatives``: from choices to rows with labels
``online/``               ``train_online``, its workers and owners, ``compare_online``, ``ForeignModel``
``gradients/``            linear models, their gradients, offline training, ``StandardScaler``
``late_labels/``          ``DelayedLabels``: the join of questions with answers, in the order of event time
``model_owner``           the owner of a model, which publishes its versions
``ready_made/``           ``AdaptiveLinearModel``: its columns, its members and their compiled steps
``quality/``              ``ProgressiveValidation``, detectors of drift, fields under watch
``losses``, ``labels``    what a wrong prediction costs; how labels become numbers
``estimators``            the common parts of all ``fit`` methods
``rows``                  ``Examples``, ``BadRows``: mini-batches, refused rows
``asked_questions``       what a join of questions with labels is given and tells
========================  ==============================================================================
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamiter.learn.clusters.centroids import OnlineKMeans
    from streamiter.learn.clusters.clustering import KMeans, k_means
    from streamiter.learn.clusters.online_centroids import online_k_means
    from streamiter.learn.gradients.features import FeatureHasher, StandardScaler, online_standard_scaler, scaled
    from streamiter.learn.gradients.gradient import Gradient
    from streamiter.learn.gradients.linear import LinearModel
    from streamiter.learn.gradients.regression import (
        Fit,
        LinearRegression,
        LogisticRegression,
        OfflineTraining,
        train_offline,
    )
    from streamiter.learn.item_sets import ItemSet, apriori
    from streamiter.learn.late_labels.delayed_labels import DelayedLabels
    from streamiter.learn.losses import HingeLoss, HuberLoss, LogLoss, PoissonLoss, QuantileLoss, SquaredLoss
    from streamiter.learn.model_owner import PublishSchedule
    from streamiter.learn.negatives import sampled_negatives
    from streamiter.learn.on_parameter_server import k_means_on_parameter_server, train_on_parameter_server
    from streamiter.learn.online.comparison import ComparedMetrics, ComparisonTable, OnlineComparison, compare_online
    from streamiter.learn.online.foreign_models import ForeignModel
    from streamiter.learn.online.train_online import OnlineTraining, train_online
    from streamiter.learn.quality.drift import ADWIN, DriftEvent, DriftWatch, PageHinkley
    from streamiter.learn.quality.field_watch import FieldReport, FieldWatch, compare_profiles
    from streamiter.learn.quality.validation import PredictedRows, ProgressiveValidation
    from streamiter.learn.quality.validation_step import TrainingAdvice
    from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
    from streamiter.learn.ready_made.embeddings import Embeddings
    from streamiter.learn.rows import BadRows, Examples
    from streamiter.learn.scikit_learn import OnlineClassifier as OnlineClassifier
    from streamiter.learn.scikit_learn import OnlineRegressor as OnlineRegressor
    from streamiter.learn.server_training import ParameterServerTraining, ParameterServerWorker
    from streamiter.learn.trees.decision_tree import DecisionTree
    from streamiter.parameter_server.optimizers import (
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
    from streamiter.values.sparse_rows import SparseRows
else:
    from streamiter.values.helpers.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "streamiter.learn.ready_made.adaptive": "AdaptiveLinearModel",
            "streamiter.learn.clusters.centroids": "OnlineKMeans",
            "streamiter.learn.clusters.clustering": "KMeans k_means",
            "streamiter.learn.online.comparison": "ComparedMetrics ComparisonTable OnlineComparison compare_online",
            "streamiter.learn.trees.decision_tree": "DecisionTree",
            "streamiter.learn.late_labels.delayed_labels": "DelayedLabels",
            "streamiter.learn.quality.drift": "ADWIN DriftEvent DriftWatch PageHinkley",
            "streamiter.learn.ready_made.embeddings": "Embeddings",
            "streamiter.learn.quality.field_watch": "FieldReport FieldWatch compare_profiles",
            "streamiter.learn.gradients.features": "FeatureHasher StandardScaler online_standard_scaler scaled",
            "streamiter.learn.online.foreign_models": "ForeignModel",
            "streamiter.learn.gradients.gradient": "Gradient",
            "streamiter.learn.item_sets": "ItemSet apriori",
            "streamiter.learn.gradients.linear": "LinearModel",
            "streamiter.learn.losses": "HingeLoss HuberLoss LogLoss PoissonLoss QuantileLoss SquaredLoss",
            "streamiter.learn.model_owner": "PublishSchedule",
            "streamiter.learn.negatives": "sampled_negatives",
            "streamiter.learn.on_parameter_server": "k_means_on_parameter_server train_on_parameter_server",
            "streamiter.learn.online.train_online": "OnlineTraining train_online",
            "streamiter.learn.clusters.online_centroids": "online_k_means",
            "streamiter.learn.gradients.regression": "Fit LinearRegression LogisticRegression OfflineTraining "
            "train_offline",
            "streamiter.learn.rows": "BadRows Examples",
            # They need scikit-learn, so they are not in `__all__`.
            "streamiter.learn.scikit_learn": "OnlineClassifier OnlineRegressor",
            "streamiter.learn.server_training": "ParameterServerTraining ParameterServerWorker",
            "streamiter.learn.quality.validation": "PredictedRows ProgressiveValidation",
            "streamiter.learn.quality.validation_step": "TrainingAdvice",
            "streamiter.parameter_server.optimizers": "FTRL SGD AdaDelta AdaGrad Adam Constant Correction "
            "GradientDescent Inverse InverseSquareRoot LearningRate Momentum Optimizer RMSProp WarmRestarts",
            "streamiter.values.sparse_rows": "SparseRows",
        },
    )

__all__ = [
    "ADWIN",
    "FTRL",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdaptiveLinearModel",
    "BadRows",
    "ComparedMetrics",
    "ComparisonTable",
    "Constant",
    "Correction",
    "DecisionTree",
    "DelayedLabels",
    "DriftEvent",
    "DriftWatch",
    "Embeddings",
    "Examples",
    "FeatureHasher",
    "FieldReport",
    "FieldWatch",
    "Fit",
    "ForeignModel",
    "Gradient",
    "GradientDescent",
    "HingeLoss",
    "HuberLoss",
    "Inverse",
    "InverseSquareRoot",
    "ItemSet",
    "KMeans",
    "LearningRate",
    "LinearModel",
    "LinearRegression",
    "LogLoss",
    "LogisticRegression",
    "Momentum",
    "OfflineTraining",
    "OnlineComparison",
    "OnlineKMeans",
    "OnlineTraining",
    "Optimizer",
    "PageHinkley",
    "ParameterServerTraining",
    "ParameterServerWorker",
    "PoissonLoss",
    "PredictedRows",
    "ProgressiveValidation",
    "PublishSchedule",
    "QuantileLoss",
    "RMSProp",
    "SparseRows",
    "SquaredLoss",
    "StandardScaler",
    "TrainingAdvice",
    "WarmRestarts",
    "apriori",
    "compare_online",
    "compare_profiles",
    "k_means",
    "k_means_on_parameter_server",
    "online_k_means",
    "online_standard_scaler",
    "sampled_negatives",
    "scaled",
    "train_offline",
    "train_on_parameter_server",
    "train_online",
]
