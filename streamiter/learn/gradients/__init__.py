"""Learners by gradients: linear models, their gradients, and the workers that train them."""
