"""The ready-made learner: how it reads rows, its members, and the steps that it makes with each row."""
