"""Topics in an SQLite file: ``sqlite:///relative.db?topic=clicks``, ``sqlite:////absolute.db?topic=clicks``.

One file holds many topics. It needs no server, survives ``kill -9`` and power cuts, and is read by any
number of processes while others write. Order of reading for newcomers: `schema` (what lies in the file),
`log` (every statement on it), `writer`, `reader` and `transactions` (who calls them), `database` (the
thread they run in).
"""

from streamiter_sqlite.topic import SqliteConnector, SqliteTopic

__all__ = ["SqliteConnector", "SqliteTopic"]
