"""Files as topics, at ``file:`` URLs: JSON lines, CSV, LIBSVM, dummy and text, plain or gzip; Parquet and Arrow.

Sources are bounded; sinks append lines, or write new files of tables. `FilesTopic` describes the guarantees of reading
and writing. Newcomers read in this order: `topic`, `options` (URLs, options, formats), `chunks` (from bytes to
records), `writer`, and the formats `csv_format`, `sparse_format` and `table_format`.
"""

from streamiter_files.csv_format import Csv
from streamiter_files.sparse_format import Dummy, Libsvm
from streamiter_files.table_format import Table
from streamiter_files.topic import FilesConnector, FilesTopic

__all__ = ["Csv", "Dummy", "FilesConnector", "FilesTopic", "Libsvm", "Table"]
