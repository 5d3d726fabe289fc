"""Topics in an SQLite file: ``sqlite:///relative.db?topic=clicks``, ``sqlite:////absolute.db?topic=clicks``.

One file holds many topics. It needs no server and survives ``kill -9`` and power cuts. Any number of processes may
read the file while others write to it. Newcomers read in this order: `file` (the tables, the connection and its
thread), `log` (the statements that change the file), `writer` and `reader`, `topic`.
"""

from streamiter_sqlite.topic import SqliteConnector, SqliteTopic

__all__ = ["SqliteConnector", "SqliteTopic"]
