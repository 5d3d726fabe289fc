"""The online-learning service: a flow that learns and publishes, with health, metrics, predictions and a page."""
