"""Training on a parameter server: workers that share their parameters through it, in step or each at its own pace.

====================  ===================================================================================
``training``          ``train_on_parameter_server``: linear and logistic regression
``k_means``           ``k_means_on_parameter_server``
``flow``              the steps that both are made of
``options``           the checks of their options
``worker``            ``ParameterServerWorker``: pull, compute, push, clock
``versions``          the versions of the model, and how the training goes
``learner``           what a worker is told of a model: what to pull, to compute, to push
``linear_learner``    that of linear models
``mini_batches``      mini-batches of examples, with the columns they need
``centroid_learner``  that of k-means
``move_centroids``    the update function of k-means
``repeating``         bounded data, gone through again and again
====================  ===================================================================================
"""
