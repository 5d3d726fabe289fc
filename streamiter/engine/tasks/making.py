"""The operators and sources of a step, as its factories make them, and the checks of their methods.

The checks raise GraphError for a method that the engine could not call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from streamiter.engine.graph.graph import SINGLE_INPUT, Step
from streamiter.errors import GraphError, StreamiterError
from streamiter.operators.functions import misfit
from streamiter.operators.operator import Boundary, IterationListener, Operator
from streamiter.operators.source import Source

T = TypeVar("T")

_OPERATOR_METHODS: Final[Mapping[str, Sequence[str]]] = {
    "open": ["context"],
    "finish": ["out"],
    "close": [],
    "snapshot": [],
    "restore": ["state"],
    "redistribute": ["states", "parallelism"],
    "wanted_inputs": [],
    "input_ended": ["name", "out"],
    "on_timer": ["payload", "out"],
    "on_event_timer": ["payload", "out"],
    "on_event_time_watermark": ["watermark", "out"],
    "on_epoch_watermark_incremented": ["epoch_watermark", "context", "out"],
    "on_iteration_terminated": ["context", "out"],
}
"""The methods of an operator that the engine calls if they exist, with the names of their arguments."""

SOURCE_METHODS: Final[Mapping[str, Sequence[str]]] = {
    "open": ["context", "positions"],
    "read": [],
    "positions": [],
    "settled": ["positions"],
    "is_idle": [],
    "lag": [],
    "report_positions": ["group", "positions"],
    "redistribute": ["positions", "parallelism"],
    "close": [],
}
"""The methods of a source that the engine calls, with the names of their arguments."""


def handler_of(
    operator: Operator | type[Operator], input_name: str, *, step: str, keyed: bool = False, where: str | None = None
) -> tuple[str, bool]:
    """Return the name of the method that handles an input, and whether the method takes whole batches.

    If the operator has both methods, the one for batches is used; with keys, the one for records. Raises GraphError if
    it has neither.
    """
    suffix = "" if input_name == SINGLE_INPUT else f"_{input_name}"
    by_record, by_batch = (f"process{suffix}", False), (f"process{suffix}_batch", True)
    for method, whole_batches in (by_record, by_batch) if keyed else (by_batch, by_record):
        if callable(getattr(operator, method, None)):
            return method, whole_batches
    raise GraphError(
        f"step {step!r}: expected {_class_of(operator)} to define {by_record[0]}(record, out) or "
        f"{by_batch[0]}(batch, out), given neither; define one of them",
        where=where,
    )


def check_handlers(
    operator: Operator | type[Operator], input_names: Sequence[str], *, step: str, keyed: bool, where: str | None = None
) -> None:
    """Raise GraphError for an operator, or its class, with methods that the engine cannot call.

    ``where`` is the line that added the step; None while that line runs.
    """
    methods = dict(_OPERATOR_METHODS)
    for input_name in input_names:
        method, whole_batches = handler_of(operator, input_name, step=step, keyed=keyed, where=where)
        methods[method] = ["batch" if whole_batches else "record", "out"]
        if keyed and whole_batches and input_name == SINGLE_INPUT:
            raise GraphError(
                f"step {step!r}: expected {_class_of(operator)} to define process(record, out), since a keyed step "
                "works record by record, given a method for whole batches; define process, or leave out key_by",
                where=where,
            )
        if operator.runs_in_thread and inspect.iscoroutinefunction(getattr(operator, method)):
            raise GraphError(
                f"step {step!r}: expected {_class_of(operator)}.{method} to be a plain method, since it runs in a "
                "thread, given a coroutine function; write def, or leave out runs_in_thread",
                where=where,
            )
    check_methods(operator, methods, step=step, where=where)
    asked = [("wanted_inputs", "it is asked after each record"), ("on_event_time_watermark", "records wait for it")]
    if operator.runs_in_thread:
        asked.append(("on_event_timer", "its step runs in a thread"))
    for method, reason in asked:
        if inspect.iscoroutinefunction(getattr(operator, method, None)):
            raise GraphError(
                f"step {step!r}: expected {_class_of(operator)}.{method} to be a plain method, since {reason}, given a "
                "coroutine function; write def",
                where=where,
            )


def check_methods(owner: object, methods: Mapping[str, Sequence[str]], *, step: str, where: str | None = None) -> None:
    """Raise GraphError for a method of an operator or source, or of its class, that does not take these arguments."""
    for method, takes in methods.items():
        called = getattr(owner, method, None)
        if called is None:
            continue
        if not callable(called):
            raise GraphError(
                f"step {step!r}: expected {_class_of(owner)}.{method} to be a method, given {called!r}; write def "
                f"{method}({', '.join(['self', *takes])})",
                where=where,
            )
        # A class returns the plain function for a method of its instances.
        unbound = isinstance(owner, type) and inspect.isfunction(called) and not _is_static(owner, method)
        if reason := misfit(called, takes, unbound=unbound):
            raise GraphError(
                f"step {step!r}: expected {_class_of(owner)}.{method} to be called as {method}({', '.join(takes)}), "
                f"given {reason}; write def {method}({', '.join(['self', *takes])})",
                where=where,
            )


def _is_static(kind: type, method: str) -> bool:
    defined = next(vars(base)[method] for base in kind.__mro__ if method in vars(base))
    return isinstance(defined, staticmethod)


def check_in_step(step: Step, operator: Operator | type[Operator]) -> None:
    """Raise GraphError for an operator, or its class, that needs epochs or times that its step does not have."""
    is_listener = issubclass(operator if isinstance(operator, type) else type(operator), IterationListener)
    if is_listener and not step.hears_of_epochs and getattr(operator, "needs_epochs", True):
        raise GraphError(
            f"step {step.name!r}: expected an IterationListener in the body of an iteration, given "
            f"{_class_of(operator)} outside, where no epoch ends and no callback comes; add the step in the body, "
            "stamp the stream with epochs_every, or set needs_epochs = False in a class that also works without",
            where=step.where,
        )
    if not step.has_event_time and callable(getattr(operator, "on_event_timer", None)):
        raise GraphError(
            f"step {step.name!r}: expected a stream with event time, since {_class_of(operator)} defines "
            "on_event_timer, given one without; put .event_time(…) before the step",
            where=step.where,
        )
    if step.loop is not None:
        step.loop.check_operator(step, operator)


def _class_of(owner: object) -> str:
    return (owner if isinstance(owner, type) else type(owner)).__name__


def is_awaited(operator: Operator, input_names: Sequence[str], *, step: str, keyed: bool = False) -> bool:
    """Return whether the task must await the operator: a method is a coroutine function, or runs in a thread."""
    if operator.runs_in_thread:
        return True
    methods = [getattr(operator, handler_of(operator, name, step=step, keyed=keyed)[0]) for name in input_names]
    methods.append(getattr(operator, "on_event_timer", None))
    return any(inspect.iscoroutinefunction(method) for method in methods)


# -- making ------------------------------------------------------------------------------------------------


def operators_of(step: Step, subtasks: Sequence[int], first: Operator | None) -> dict[int, Operator]:
    """Return the operators of these subtasks; ``first`` is the operator of subtask 0, if it is made and checked."""
    operators: dict[int, Operator] = {} if first is None else {0: first}
    checked = {type(operator) for operator in operators.values()}
    for subtask in subtasks[len(operators) :]:
        operator = operators[subtask] = operator_of(step)
        if type(operator) not in checked:
            checked.add(type(operator))
            # Its class was checked when the step was added, unless its factory is a function.
            if step.source is None and not isinstance(operator, Boundary):
                keyed = step.keys is not None
                check_handlers(operator, step.input_names(), step=step.name, keyed=keyed, where=step.where)
            check_in_step(step, operator)
    return operators


def operator_of(step: Step) -> Operator:
    return _made_by(step.factory, step, Operator, "an Operator", "streamiter.Operator")


def check_not_shared(operators: Mapping[Step, Mapping[int, Operator]]) -> None:
    owners: dict[int, Step] = {}
    for step, instances in operators.items():
        for operator in instances.values():
            owner = owners.setdefault(id(operator), step)
            if owner is not step or sum(operator is other for other in instances.values()) > 1:
                raise GraphError(
                    f"step {step.name!r}: expected its factory to make a new operator for each "
                    f"subtask, given one that step {owner.name!r} already has; make it inside the factory",
                    where=step.where,
                )


def _made_by(factory: Callable[[], object], step: Step, kind: type[T], in_words: str, public_name: str) -> T:
    try:
        made = factory()
    except StreamiterError:
        raise  # its message says what is wrong
    except Exception as error:
        raise GraphError(
            f"step {step.name!r}: expected its factory to work without arguments, given "
            f"{type(error).__name__}: {error}; correct the factory, which is called once for each subtask",
            where=step.where,
        ) from error
    if not isinstance(made, kind):
        raise GraphError(
            f"step {step.name!r}: expected its factory to give {in_words}, given {type(made).__name__}; derive it from "
            f"{public_name}",
            where=step.where,
        )
    return made


def make_source(step: Step) -> Source:
    assert step.source is not None
    source = _made_by(step.source, step, Source, "a Source", "streamiter.operators.Source")
    check_methods(source, SOURCE_METHODS, step=step.name, where=step.where)
    return source
