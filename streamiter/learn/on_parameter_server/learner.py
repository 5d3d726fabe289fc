"""What a worker is told of the model it trains."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, NamedTuple

from streamiter.parameter_server.consistency.settings import BSP, Consistency

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client

__all__ = ["Computed", "Learner"]


class Computed(NamedTuple):
    """What came of one mini-batch."""

    contribution: Any
    """To be pushed; None: nothing."""
    loss: float
    """The sum over its records, with the parameters that were pulled."""
    records: int
    """How many it has learned from."""


class Learner(abc.ABC):
    """A model whose parameters lie in a matrix: what is pulled for a mini-batch, computed of it, and pushed.

    It holds settings only, and is shared by all workers.
    """

    matrix: str
    """The name of the matrix, whose clock is the training's."""

    metric: str
    """The name of its mean loss, among the metrics of a version."""

    consistency: Consistency

    @property
    def is_in_step(self) -> bool:
        """Whether what is pushed is applied with the clock of all workers."""
        return isinstance(self.consistency, BSP)

    @abc.abstractmethod
    async def create(self, client: Client) -> None:
        """Make the matrix, unless another worker has."""

    @abc.abstractmethod
    async def pull(self, client: Client, mini_batch: Any) -> Any:
        """The parameters that this mini-batch needs."""

    @abc.abstractmethod
    def compute(self, mini_batch: Any, pulled: Any) -> Computed:
        """What is to be pushed, and the loss. Raises ModelError where the arithmetic breaks down."""

    @abc.abstractmethod
    async def push(self, client: Client, mini_batch: Any, contribution: Any) -> None:
        """Have it added to the parameters, at once or with the clock, as the consistency says."""

    async def clock(self, client: Client) -> None:
        """Say that this mini-batch is over: of every matrix there is."""
        await client.clock(self.matrix)

    @abc.abstractmethod
    async def settle(self, client: Client) -> None:
        """Return when the last clock of this worker is over as far as the consistency has it: in step, for all."""

    @abc.abstractmethod
    async def parameters(self, client: Client) -> dict[str, Any]:
        """All that a consumer needs, for a version of the model."""
