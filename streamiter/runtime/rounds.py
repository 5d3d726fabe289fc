"""Rounds: a step of which each epoch has an operator of its own, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from streamiter.errors import ConfigurationError
from streamiter.operators.context import Progress
from streamiter.operators.operator import Operator
from streamiter.operators.rejection import RecordFailure
from streamiter.runtime.gate import Gate
from streamiter.runtime.instance import OperatorInstance

__all__ = ["Rounds"]


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

    async def begin(self, epoch: int) -> None:
        """A record of this epoch has come: make and open an operator for it."""
        self._instance.renew(self._new_operator())
        self.epoch = epoch
        self._told = []
        await self._instance.open()

    def _new_operator(self) -> Operator:
        operator = self._make_operator()
        if operator is self._instance.operator:
            name = self._instance.step.name
            raise RecordFailure(name) from ConfigurationError(
                f"step {name!r}: expected its factory to make a new operator for each round, given the same again; "
                "make it inside the factory"
            )
        return operator

    async def tell_ended_inputs(self) -> bool:
        """Tell the operator of inputs that have ended for it since it was last told; says whether any have."""
        if self.epoch is None:
            return False
        ended = [name for name in self._gate.inputs_complete(self.epoch) if name not in self._told]
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

    async def terminate(self, epoch: int | None) -> None:
        """The iteration ends in ``epoch`` (None: in that of the operator): if an operator lives, so does it."""
        if self.epoch is None:
            return
        await self._tell_of_all_inputs()
        instance = self._instance
        self._progress.epoch = self.epoch if epoch is None else epoch
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
        await self._instance.close()

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
