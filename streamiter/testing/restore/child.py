"""What runs in the fresh process: it restores what it is given, and answers with what came of it."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from streamiter.checkpoints.plain_data import PlainData
from streamiter.testing.restore.differences import resolve
from streamiter.testing.restore.driving import JobOutcome, RunOptions, run_freely, run_in_steps
from streamiter.testing.restore.process import read_frame, write_frame
from streamiter.testing.restore.trial import Build, BuiltFlow

__all__ = ["main", "restored_run"]


def restored_run(
    build: Build,
    structs: Sequence[type[msgspec.Struct]],
    options: RunOptions,
    snapshot: bytes,
    plan: Sequence[tuple[str, int]] | None,
) -> JobOutcome:
    """Go on from a snapshot to the end: by the plan of reads, or freely where there is none."""
    built = BuiltFlow(build, structs, gated=plan is not None)
    if plan is None:
        return asyncio.run(run_freely(built, options, snapshot=snapshot))
    return asyncio.run(run_in_steps(built, options, plan=plan, snapshot=snapshot))


def main() -> None:
    """Answer requests from stdin until it ends."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What the user's own code prints must not come between the answers, nor may it read the requests.
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    while True:
        try:
            names, request = read_frame(requests), read_frame(requests)
        except EOFError:
            return
        write_frame(answers, PlainData().encode(_answer(names, request)))


def _answer(names: bytes, request: bytes) -> dict[str, Any]:
    try:
        path, described = PlainData().decode(names)
        sys.path[:] = path
        structs = [resolve(name) for name in described]
        asked = PlainData(structs).decode(request)
        options = RunOptions(asked["seed"], asked["interval_s"], asked["start_ms"])
        run = restored_run(resolve(asked["build"]), structs, options, asked["snapshot"], asked["plan"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return {
        "outputs": run.outputs,
        "results": run.results,
        "last_state": run.last_state,
        "final_states": run.final_states,
        "violations": run.violations,
    }
