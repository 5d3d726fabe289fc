"""Mini-batches as arrays: dense or sparse rows, examples, points; and how bad rows are told apart.

=================  ======================================================================================
``checks``         ``BadRows``, and the checks that raise it
``good_rows``      going on without the bad rows: what operators around learners have in common
``feature_rows``   what linear models ask of rows, dense or sparse alike
``points``         rows that are dense and finite
``examples``       ``Examples``: features, targets, weights
=================  ======================================================================================
"""
