"""Where the states of keys are kept.

``backends`` has what a job asks of a backend, and the default, memory. ``rocks_state`` keeps states in RocksDB:
``RocksState`` are its settings, ``database`` is one database, ``due_rows`` has what is due at which time in it, and
``stored`` reads databases of a snapshot.
"""
