"""Offline training of linear models.

==================  =====================================================================================
``training``        ``train_offline``: a bounded iteration of the steps below
``workers``         the step that makes the gradients, of examples that are kept or replayed
``owners``          the step that applies them, and tells the loss
``example_blocks``  examples that are gone through again and again
==================  =====================================================================================
"""
