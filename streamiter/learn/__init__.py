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
    from streamiter.learn.clusters.centroids import OnlineKMeans as OnlineKMeans
    from streamiter.learn.clusters.clustering import KMeans as KMeans, k_means as k_means
    from streamiter.learn.clusters.online_centroids import online_k_means as online_k_means
    from streamiter.learn.gradients.features import (
        FeatureHasher as FeatureHasher,
        StandardScaler as StandardScaler,
        online_standard_scaler as online_standard_scaler,
        scaled as scaled,
    )
    from streamiter.learn.gradients.gradient import Gradient as Gradient
    from streamiter.learn.gradients.linear import LinearModel as LinearModel
    from streamiter.learn.gradients.regression import (
        Fit as Fit,
        LinearRegression as LinearRegression,
        LogisticRegression as LogisticRegression,
        OfflineTraining as OfflineTraining,
        train_offline as train_offline,
    )
    from streamiter.learn.item_sets import ItemSet as ItemSet, apriori as apriori
    from streamiter.learn.late_labels.delayed_labels import DelayedLabels as DelayedLabels
    from streamiter.learn.losses import (
        HingeLoss as HingeLoss,
        HuberLoss as HuberLoss,
        LogLoss as LogLoss,
        PoissonLoss as PoissonLoss,
        QuantileLoss as QuantileLoss,
        SquaredLoss as SquaredLoss,
    )
    from streamiter.learn.model_owner import PublishSchedule as PublishSchedule
    from streamiter.learn.negatives import sampled_negatives as sampled_negatives
    from streamiter.learn.on_parameter_server import (
        k_means_on_parameter_server as k_means_on_parameter_server,
        train_on_parameter_server as train_on_parameter_server,
    )
    from streamiter.learn.online.comparison import (
        ComparedMetrics as ComparedMetrics,
        ComparisonTable as ComparisonTable,
        OnlineComparison as OnlineComparison,
        compare_online as compare_online,
    )
    from streamiter.learn.online.foreign_models import ForeignModel as ForeignModel
    from streamiter.learn.online.train_online import OnlineTraining as OnlineTraining, train_online as train_online
    from streamiter.learn.quality.drift import (
        ADWIN as ADWIN,
        DriftEvent as DriftEvent,
        DriftWatch as DriftWatch,
        PageHinkley as PageHinkley,
    )
    from streamiter.learn.quality.field_watch import (
        FieldReport as FieldReport,
        FieldWatch as FieldWatch,
        compare_profiles as compare_profiles,
    )
    from streamiter.learn.quality.validation import (
        PredictedRows as PredictedRows,
        ProgressiveValidation as ProgressiveValidation,
    )
    from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel as AdaptiveLinearModel
    from streamiter.learn.ready_made.embeddings import Embeddings as Embeddings
    from streamiter.learn.rows import BadRows as BadRows, Examples as Examples
    from streamiter.learn.scikit_learn import OnlineClassifier as OnlineClassifier, OnlineRegressor as OnlineRegressor
    from streamiter.learn.server_training import (
        ParameterServerTraining as ParameterServerTraining,
        ParameterServerWorker as ParameterServerWorker,
    )
    from streamiter.learn.trees.decision_tree import DecisionTree as DecisionTree
    from streamiter.parameter_server.optimizers import (
        FTRL as FTRL,
        SGD as SGD,
        AdaDelta as AdaDelta,
        AdaGrad as AdaGrad,
        Adam as Adam,
        Constant as Constant,
        Correction as Correction,
        GradientDescent as GradientDescent,
        Inverse as Inverse,
        InverseSquareRoot as InverseSquareRoot,
        LearningRate as LearningRate,
        Momentum as Momentum,
        Optimizer as Optimizer,
        RMSProp as RMSProp,
        WarmRestarts as WarmRestarts,
    )
    from streamiter.values.sparse_rows import SparseRows as SparseRows
else:
    from streamiter.values.helpers.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
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
            "streamiter.learn.server_training": "ParameterServerTraining ParameterServerWorker",
            "streamiter.learn.quality.validation": "PredictedRows ProgressiveValidation",
            "streamiter.parameter_server.optimizers": "FTRL SGD AdaDelta AdaGrad Adam Constant Correction "
            "GradientDescent Inverse InverseSquareRoot LearningRate Momentum Optimizer RMSProp WarmRestarts",
            "streamiter.values.sparse_rows": "SparseRows",
        },
        needing_extras={"streamiter.learn.scikit_learn": "OnlineClassifier OnlineRegressor"},
    )
