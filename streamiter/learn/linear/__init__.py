"""The arithmetic of linear models.

===================  ====================================================================================
``model``            ``LinearModel``: predicts, learns, makes gradients
``weights``          its weights with the optimizer's slots: steps, snapshots, warm starts
``losses``           what a prediction costs, and the link
``gradients``        ``Gradient``: what several workers add up for one step
``parameter_owner``  the step that keeps a model and publishes it, online and offline
===================  ====================================================================================
"""
