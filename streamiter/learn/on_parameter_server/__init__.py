"""Training on a parameter server: workers share their parameters through it, in step or each at its own pace.

``worker`` has the workers and their models, ``training`` the steps of a training and ``train_on_parameter_server`` for
linear models, ``k_means`` has ``k_means_on_parameter_server``.
"""
