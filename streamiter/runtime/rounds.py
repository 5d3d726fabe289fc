"""Rounds: a step of which each epoch has an operator of its own, one at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, final

from streamiter.errors import ConfigurationError, StreamiterError
from streamiter.operators.context import Progress
from streamiter.operators.operator import Operator
from streamiter.operators.rejection import RecordFailure
from streamiter.runtime.gate import Gate
from streamiter.runtime.instance import OperatorInstance

__all__ = ["Rounds"]

CloseNow = Callable[[Callable[[], Coroutine[Any, Any, None]]], Awaitable[None]]


@final
class Rounds:
    """The lives of the operators of one subtask of a per-round step, which is the head of its task.

    One begins with the first record of its epoch. An input has ended for it when no record of that epoch
    can come any more; when all have, it is called back, finishes and is closed.
    """

    def __init__(
        self,
        instance: OperatorInstance,
        gate: Gate,
        progress: Progress,
        make_operator: Callable[[], Operator],
    ) -> None:
        self.epoch: int | None = None
        """That of the operator that lives now, if there is one."""
        self._instance = instance
        self._gate = gate
        self._progress = progress
        self._make_operator = make_operator
        self._told: list[str] = []
        """Inputs that it was told have ended."""
        self._close_now: CloseNow | None = None

    def close_with(self, close_now: CloseNow) -> None:
        """Be told by the task how to close what has ended, so that an abort does not interrupt it."""
        self._close_now = close_now

    async def begin(self, epoch: int) -> None:
        """A record of this epoch has come: make and open an operator for it."""
        self._instance.renew(self._new_operator())
        self.epoch = epoch
        self._told = []
        await self._instance.open()

    def _new_operator(self) -> Operator:
        name = self._instance.step.name
        try:
            operator = self._make_operator()
        except StreamiterError as error:
            raise RecordFailure(name) from error
        if operator is self._instance.operator:
            raise RecordFailure(name) from ConfigurationError(
                f"step {name!r}: expected its factory to make a new operator for each round, given the same again; "
                "make it inside the factory"
            )
        return operator

    async def tell_ended_inputs(self, *, but: str | None = None) -> bool:
        """Tell the operator of inputs that have ended for it since it was last told; says whether any have.

        ``but`` is the input of records that it is about to be given.
        """
        if self.epoch is None:
            return False
        complete = self._gate.inputs_complete(self.epoch)
        ended = [name for name in complete if name not in self._told and name != but]
        for name in ended:
            await self._tell(name)
        return bool(ended)

    async def _tell(self, input_name: str) -> None:
        assert self.epoch is not None
        self._told.append(input_name)
        if hasattr(self._instance.operator, "input_ended"):
            self._progress.epoch = self.epoch
            await self._instance.call("input_ended", input_name, self._instance.out)

    async def end(self, epoch: int) -> None:
        """The epoch is complete here: if an operator lives for it, it ends."""
        if self.epoch != epoch:
            return
        await self._tell_of_all_inputs()
        instance = self._instance
        self._progress.epoch = epoch
        if instance.is_listener:
            await instance.call("on_epoch_watermark_incremented", epoch, instance.context, instance.out)
        await self._finish()

    async def terminate(self) -> None:
        """The iteration has ended: if an operator lives, so does it, in its own epoch."""
        if self.epoch is None:
            return
        await self._tell_of_all_inputs()
        instance = self._instance
        self._progress.epoch = self.epoch
        if instance.is_listener:
            await instance.call("on_iteration_terminated", instance.context, instance.out)
        await self._finish()

    async def _tell_of_all_inputs(self) -> None:
        for name in self._instance.step.input_names():
            if name not in self._told:
                await self._tell(name)

    async def _finish(self) -> None:
        await self._instance.call("finish", self._instance.out)
        self.epoch = None
        self._gate.want(None)
        assert self._close_now is not None
        await self._close_now(self._instance.close)

    # -- state -------------------------------------------------------------------------------------------

    async def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        if self.epoch is None:
            return {"epoch": None}
        return {
            "epoch": self.epoch,
            "told": list(self._told),
            "instance": await self._instance.snapshot(),
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Take over what ``snapshot`` gave."""
        if state["epoch"] is None:
            return
        await self.begin(state["epoch"])
        self._told = list(state["told"])
        await self._instance.restore(state["instance"])
