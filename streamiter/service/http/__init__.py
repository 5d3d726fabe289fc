"""The HTTP server of a service: routes, predictions, tokens, limits, and the page."""
