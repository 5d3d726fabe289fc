"""The log of one of several processes: each line begins with the number of the process."""

from __future__ import annotations

import logging
from typing import final


@final
class ProcessLines(logging.Formatter):
    r"""Formats records as text, with ``process 2: `` before each line.

    >>> record = logging.makeLogRecord({"msg": "one\ntwo"})
    >>> print(ProcessLines(2).format(record))
    process 2: one
    process 2: two
    """

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(f"process {self._process}: {line}" for line in super().format(record).splitlines())
