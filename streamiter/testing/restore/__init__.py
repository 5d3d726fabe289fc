"""Restore equivalence: run n, snapshot, restore in a fresh process, run m = run n + m, bit for bit.

===================  ====================================================================================
``check``            ``check_restore`` and ``check_flow_restore``: what users call
``operator_flow``    the flow around a single operator or source
``trial``            a flow under test: built, with taps behind its outputs and watched operators
``driver``           its job at work: sources read, and time passes, when told to
``driving``          the runs: record by record, or for some turns of the event loop
``watch``            what operators are asked for and given, and whether it changes afterwards;
                     ``attributes``: what they hold
``process``          the fresh process, ``child`` what runs there, ``references`` what it is to import
``differences``      the first difference of two values; ``comparison``: the runs of a check
``diagnosis``        what to tell about a run that differs
===================  ====================================================================================
"""

from streamiter.testing.restore.check import check_flow_restore, check_restore
from streamiter.testing.restore.differences import RestoreMismatch
from streamiter.testing.restore.process import RestoreProcess

__all__ = ["RestoreMismatch", "RestoreProcess", "check_flow_restore", "check_restore"]
