"""What predictions were worth: ``ProgressiveValidation``, the area under the curve, and the step that reports them."""
