"""Files as topics: JSON lines, CSV, LIBSVM, dummy and text, plain or gzip, at ``file:`` URLs.

Sources are bounded; sinks append lines. See `FilesTopic` for what reading and writing promise.
"""

from streamiter_files.csv_format import Csv
from streamiter_files.sparse_format import Dummy, Libsvm
from streamiter_files.topic import FilesConnector, FilesTopic

__all__ = ["Csv", "Dummy", "FilesConnector", "FilesTopic", "Libsvm"]
