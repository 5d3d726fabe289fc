"""Training while a stream flows: ``train_online``, its workers and owners, and comparisons of several learners."""
