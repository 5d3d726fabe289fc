"""Learning on streams: models, and flows that train them. All public names are imported from here.

Each module imports only from the modules in the rows below it:

=======================================  ===============================================================
``flights``                              the data of the demo: flights, and their labels
``regression``                           ``LinearRegression``, ``LogisticRegression``, ``train_offline``
``scikit_learn``                         ``OnlineClassifier``, ``OnlineRegressor``; imported when they are used
``on_parameter_server``                  linear models and k-means, trained on a parameter server
``comparison``                           ``compare_online``: several learners on one stream
``online``                               ``train_online``: linear models in a flow
``online_workers``                       the workers of ``train_online`` that compute gradients
``row_training``                         the owner that learns row by row
``row_reading``                          the workers that read rows for the owner
``adaptive``                             ``AdaptiveLinearModel``: a linear model that needs no tuning
``expert_weights``                       its state
``row_steps``                            its arithmetic, compiled with Numba; imported when a model is made
``clustering``                           ``KMeans``, ``k_means``: clusters of bounded data
``decision_tree``                        ``DecisionTree``
``item_sets``                            ``apriori``
``centroids``                            the arithmetic of k-means
``online_centroids``                     ``online_k_means``: clusters of a stream
``negatives``                            ``sampled_negatives``: from choices to rows with labels
``features``                             ``FeatureHasher``, ``StandardScaler``: from records to features
``foreign_models``                       ``ForeignModel``: models of other libraries
``training``                             the operators that train: an owner of the parameters, and workers
``server_training``                      training on a parameter server, for any model
``tree_growing``, ``tree_splits``        how a decision tree grows; how its nodes are split
``drift``                                ``ADWIN``, ``PageHinkley``: has the loss risen?
``validation``                           ``ProgressiveValidation``: metrics of predictions
``score_metrics``                        metrics of probabilities: the area under the ROC curve, calibration
``estimators``                           the common parts of all ``fit`` methods
``linear``                               ``LinearModel``: weights, steps, gradients
``losses``                               what a wrong prediction costs; links
``rows``                                 ``Examples``, ``BadRows``: mini-batches, refused rows
``gradients``                            ``Gradient``: the sum of the gradients of some rows
=======================================  ===============================================================
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamiter.learn.adaptive import AdaptiveLinearModel
    from streamiter.learn.centroids import OnlineKMeans
    from streamiter.learn.clustering import KMeans, k_means
    from streamiter.learn.comparison import ComparedMetrics, ComparisonTable, OnlineComparison, compare_online
    from streamiter.learn.decision_tree import DecisionTree
    from streamiter.learn.delayed_labels import DelayedLabels
    from streamiter.learn.drift import ADWIN, DriftEvent, DriftWatch, PageHinkley
    from streamiter.learn.embeddings import Embeddings
    from streamiter.learn.features import FeatureHasher, StandardScaler, online_standard_scaler, scaled
    from streamiter.learn.field_watch import FieldReport, FieldWatch, compare_profiles
    from streamiter.learn.foreign_models import ForeignModel
    from streamiter.learn.gradients import Gradient
    from streamiter.learn.item_sets import ItemSet, apriori
    from streamiter.learn.linear import LinearModel
    from streamiter.learn.losses import HingeLoss, HuberLoss, LogLoss, PoissonLoss, QuantileLoss, SquaredLoss
    from streamiter.learn.model_owner import PublishSchedule
    from streamiter.learn.negatives import sampled_negatives
    from streamiter.learn.on_parameter_server import k_means_on_parameter_server, train_on_parameter_server
    from streamiter.learn.online import OnlineTraining, train_online
    from streamiter.learn.online_centroids import online_k_means
    from streamiter.learn.regression import Fit, LinearRegression, LogisticRegression, OfflineTraining, train_offline
    from streamiter.learn.rows import BadRows, Examples
    from streamiter.learn.scikit_learn import OnlineClassifier as OnlineClassifier
    from streamiter.learn.scikit_learn import OnlineRegressor as OnlineRegressor
    from streamiter.learn.server_training import ParameterServerTraining, ParameterServerWorker
    from streamiter.learn.validation import PredictedRows, ProgressiveValidation
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
            "streamiter.learn.adaptive": "AdaptiveLinearModel",
            "streamiter.learn.centroids": "OnlineKMeans",
            "streamiter.learn.clustering": "KMeans k_means",
            "streamiter.learn.comparison": "ComparedMetrics ComparisonTable OnlineComparison compare_online",
            "streamiter.learn.decision_tree": "DecisionTree",
            "streamiter.learn.delayed_labels": "DelayedLabels",
            "streamiter.learn.drift": "ADWIN DriftEvent DriftWatch PageHinkley",
            "streamiter.learn.embeddings": "Embeddings",
            "streamiter.learn.field_watch": "FieldReport FieldWatch compare_profiles",
            "streamiter.learn.features": "FeatureHasher StandardScaler online_standard_scaler scaled",
            "streamiter.learn.foreign_models": "ForeignModel",
            "streamiter.learn.gradients": "Gradient",
            "streamiter.learn.item_sets": "ItemSet apriori",
            "streamiter.learn.linear": "LinearModel",
            "streamiter.learn.losses": "HingeLoss HuberLoss LogLoss PoissonLoss QuantileLoss SquaredLoss",
            "streamiter.learn.model_owner": "PublishSchedule",
            "streamiter.learn.negatives": "sampled_negatives",
            "streamiter.learn.on_parameter_server": "k_means_on_parameter_server train_on_parameter_server",
            "streamiter.learn.online": "OnlineTraining train_online",
            "streamiter.learn.online_centroids": "online_k_means",
            "streamiter.learn.regression": "Fit LinearRegression LogisticRegression OfflineTraining train_offline",
            "streamiter.learn.rows": "BadRows Examples",
            # They need scikit-learn, so they are not in `__all__`.
            "streamiter.learn.scikit_learn": "OnlineClassifier OnlineRegressor",
            "streamiter.learn.server_training": "ParameterServerTraining ParameterServerWorker",
            "streamiter.learn.validation": "PredictedRows ProgressiveValidation",
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
