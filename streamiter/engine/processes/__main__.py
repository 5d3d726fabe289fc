"""``python -m streamiter.engine.processes``: one process of a run on this machine.

Its settings come from standard input.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import msgspec

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.job.running import run_in_own_loop
from streamiter.engine.processes.host import ProcessSettings
from streamiter.engine.processes.process import ProcessLines, load_referenced, run_process
from streamiter.errors import ConfigurationError


def main() -> None:
    """Run the part of this process in a flow."""
    # The program that has started the processes tells them to stop. A signal to all of them at once, as from a service
    # manager, must not end them before. Not SIG_IGN, which programs that a user's step starts would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ProcessSettings)
    if logging.lastResort is not None:  # It writes the log of programs that have configured none.
        logging.lastResort.setFormatter(ProcessLines(settings.number))
    if settings.import_path:
        sys.path[:] = settings.import_path
    if settings.arguments:
        sys.argv[:] = settings.arguments
    if "PYTHONBREAKPOINT" not in os.environ:  # It may name a debugger that needs no terminal.
        sys.breakpointhook = _refuse_breakpoint

    def load() -> RunnableFlow:
        flow = load_referenced(settings.flow)
        ProcessLines.put_on(settings.number)  # Modules that the flow imports may have configured the log.
        return flow

    run_in_own_loop(run_process(settings, load))


def _refuse_breakpoint(*_: object, **__: object) -> None:
    raise ConfigurationError(
        "breakpoint(): expected a process with a terminal, given one of several processes of a flow, which have none; "
        "run the flow in one process to debug it: flow.run() without on=, or streamiter run without --processes"
    )


if __name__ == "__main__":
    main()
