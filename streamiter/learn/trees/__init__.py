"""Decision trees: ``DecisionTree``, and the loop in which one grows.

=================  =============================================================================
``decision_tree``  ``DecisionTree``
``training_rows``  what it is fitted to: features, labels and weights, checked
``tree``           ``Tree``: the nodes as arrays, and the way of rows through them
``text``           a tree as text
``summaries``      what is known of the features before the first split, and where to cut them
``criteria``       ``Gini`` and ``Variance``: what is counted of rows, and how good a split is
``splits``         the best split of each node, from histograms
``worker``         the step that holds rows and makes histograms of them
``owner``          the step that holds the tree and splits its nodes
``growing``        the loop of the two
=================  =============================================================================
"""
