"""Restore equivalence: n records, a snapshot, a restore in a fresh process, m records = n + m records.

- ``check``: ``check_restore`` and ``check_flow_restore``, what users call; the runs of one check and their comparison.
- ``driving``: the flow under test, with gates at its sources and taps at its outputs, and its runs.
- ``differences``: the watch over the states of operators, and the first difference of two states or outputs.
- ``process``: the fresh process: the side of the check, and the side of the process.
"""

from streamiter.testing.restore.check import check_flow_restore, check_restore
from streamiter.testing.restore.differences import RestoreMismatch
from streamiter.testing.restore.process import RestoreProcess

__all__ = ["RestoreMismatch", "RestoreProcess", "check_flow_restore", "check_restore"]
