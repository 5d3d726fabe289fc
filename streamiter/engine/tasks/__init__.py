"""The tasks of a job: chains of operators, sources, feedback through topics, barriers."""
