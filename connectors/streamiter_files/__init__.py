"""Files as topics: JSON lines, CSV, LIBSVM, dummy and text, plain or gzip, at ``file:`` URLs.

Sources are bounded; sinks append lines. `FilesTopic` describes the guarantees of reading and writing. Newcomers read
in this order: `topic`, `options` (URLs, options, formats), `reader` and `chunks` (from bytes to records), `writer`,
and the formats `csv_format` and `sparse_format`.
"""

from streamiter_files.csv_format import Csv
from streamiter_files.sparse_format import Dummy, Libsvm
from streamiter_files.topic import FilesConnector, FilesTopic

__all__ = ["Csv", "Dummy", "FilesConnector", "FilesTopic", "Libsvm"]
