"""Online training of linear models.

===================  ====================================================================================
``training``         ``train_online``: an unbounded iteration of the steps below
``gradient_worker``  the step that predicts, and makes the gradients
``delayed_labels``   the same where labels come later than questions
``owners``           the step that applies them, as they come or epoch by epoch
===================  ====================================================================================
"""
