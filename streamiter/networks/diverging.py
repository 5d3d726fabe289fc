"""Training that is over because its numbers are not finite any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamiter.errors import ModelError

if TYPE_CHECKING:
    from streamiter.networks.fitting import TrainedNetwork

__all__ = ["Diverged"]


class Diverged(ModelError):
    """A loss, a gradient or a parameter is not finite any more.

    >>> print(Diverged("expected a finite loss, given inf").within("epoch 2"))
    epoch 2: expected a finite loss, given inf; lower lr, scale the features, or take another seed
    """

    trained: TrainedNetwork | None = None
    """Of ``fit_network``: the network as it was after the last epoch that was finite; None where none was."""

    def __init__(self, what: str) -> None:
        self._what = what
        super().__init__(f"{what}; lower lr, scale the features, or take another seed")

    def within(self, place: str) -> Diverged:
        """The same with the place in the training where it was."""
        return Diverged(f"{place}: {self._what}")
