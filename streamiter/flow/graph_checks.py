"""Checks of the graph while it is built; each error says what to write instead."""

from __future__ import annotations

import os
import sys
from typing import Any

from streamiter.errors import GraphError
from streamiter.operators.operator import Operator
from streamiter.operators.rejection import RejectionPolicy
from streamiter.runtime.entries import check_handlers
from streamiter.topics.topic import Topic

__all__ = ["check_factory", "check_parallelism", "check_policy", "user_line"]


def user_line() -> str:
    """``file:line`` of the innermost frame outside streamiter: the user's own line."""
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def check_parallelism(parallelism: int, *, step: str) -> int:
    """A whole number of at least 1."""
    if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
        raise GraphError(
            f"step {step!r}: expected a parallelism of at least 1, given {parallelism!r}; use a whole number"
        )
    return parallelism


def check_policy(on_error: RejectionPolicy, dead_letter: Topic | None, *, step: str) -> RejectionPolicy:
    """What becomes of refused records; ``dead_letter`` alone says that they go there."""
    if on_error not in ("fail", "skip", "dead_letter"):
        raise GraphError(
            f'step {step!r}: expected on_error "fail", "skip" or "dead_letter", given {on_error!r}; '
            "choose one of these"
        )
    if dead_letter is None:
        if on_error == "dead_letter":
            raise GraphError(
                f'step {step!r}: on_error="dead_letter" expected a topic for the dead letters, given none; '
                'add dead_letter=topic("scheme://…")'
            )
        return on_error
    if not isinstance(dead_letter, Topic):
        raise GraphError(
            f"step {step!r}: expected dead_letter to be a topic, given {dead_letter!r}; "
            'write dead_letter=topic("scheme://…")'
        )
    if on_error == "skip":
        raise GraphError(
            f'step {step!r}: expected on_error="skip" or a dead_letter topic, given both; leave one of them out'
        )
    return "dead_letter"


def check_factory(
    factory: Any, input_names: list[str], *, step: str, base: type[Any] = Operator, keyed: bool = False
) -> None:
    """An operator (or source) class or a callable without arguments; an instance would be shared."""
    kind = base.__name__
    room = "streamiter" if base is Operator else base.__module__.rpartition(".")[0]
    if isinstance(factory, base):
        name = type(factory).__name__
        raise GraphError(
            f"step {step!r}: expected a class or a callable without arguments that makes a new {kind}, given "
            f"an instance of {name}, which all subtasks would share; write {name} or lambda: {name}(…)"
        )
    if not callable(factory):
        raise GraphError(
            f"step {step!r}: expected a class or a callable without arguments that makes a new {kind}, "
            f"given {factory!r}"
        )
    if isinstance(factory, type):
        if not issubclass(factory, base):
            raise GraphError(
                f"step {step!r}: expected a class derived from {room}.{kind}, given {factory.__name__}"
            )
        if base is Operator:
            check_handlers(factory, input_names, step=step, keyed=keyed)
