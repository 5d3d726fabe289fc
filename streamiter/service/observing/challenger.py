"""The challenger of a service as the surfaces see it: its last version, its figures, and its share of the requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamiter.learn.online.challengers import CHALLENGER_STOPPED, ComparedRows
from streamiter.models import ModelUpdate, ServedModel
from streamiter.models.served import ServedVersion
from streamiter.models.update import learner_in
from streamiter.service.settings.tables import ChallengerSettings
from streamiter.values.hashes import hash_of


@dataclass(slots=True)
class Challenger:
    """Follows the versions that the challenger publishes under its own name."""

    name: str
    served: ServedModel
    settings: ChallengerSettings
    told_by: Callable[[], ModelUpdate | None] = lambda: None
    """Returns the version of the service that tells whether it has stopped; None in the process that trains it."""
    failure: str | None = None
    """Why its learner has stopped in this process, which the service notes; None: it has not."""

    @property
    def stopped(self) -> str | None:
        """Why its learner has stopped, in this process or in that of the service; None: it has not."""
        if self.failure is None and (model := self.told_by()) is not None and model.metrics.get(CHALLENGER_STOPPED):
            return "the log of the service says why"
        return self.failure

    @property
    def compared(self) -> ComparedRows | None:
        """The comparison with the champion that the last version tells; None before the first one."""
        return None if self.served.update is None else ComparedRows.of(self.served.update.metrics)

    def is_served_in(self, model: ModelUpdate | None) -> bool:
        """Whether it was promoted, so that this version of the service is one of the challenger."""
        return model is not None and learner_in(model.parameters) == self.name

    def version_for(self, row: object) -> ServedVersion | None:
        """Return the version of the challenger if it answers for a row; None if the service itself does.

        The hash of the key decides, so a key always gets the same learner. Rows without a key, and all rows while the
        challenger has no version, or has stopped, are those of the service itself.
        """
        share, key = self.settings.share, self.settings.key
        if share is None or key is None or not isinstance(row, Mapping):
            return None
        if self.served.update is None or self.stopped is not None:
            return None
        value: Any = row.get(key)
        # Another challenger gets other keys.
        is_taken = value is not None and hash_of(f"{self.name}:{value}".encode()) < share * 2.0**64
        return self.served.version_now() if is_taken else None


@dataclass(frozen=True, slots=True)
class ChallengerNow:
    """The challenger, and its comparison with the champion; None: not known."""

    name: str
    generation: int | None
    version: int | None
    is_served: bool
    """Whether it was promoted: the versions of the service are those of the challenger."""
    share: float | None
    """The share of the keys that it answers for."""
    stopped: str | None
    """Why its learner has stopped; None: it has not."""
    compared: ComparedRows | None
    verdict: Literal["better", "worse", "not known yet"]

    @staticmethod
    def of(challenger: Challenger, model: ModelUpdate | None) -> ChallengerNow:
        """Return what is known, beside the version of the service that answers now."""
        update, compared = challenger.served.update, challenger.compared
        return ChallengerNow(
            name=challenger.name,
            generation=None if update is None else update.generation,
            version=None if update is None else update.version,
            is_served=challenger.is_served_in(model),
            share=challenger.settings.share,
            stopped=challenger.stopped,
            compared=compared,
            verdict="not known yet" if compared is None else compared.verdict,
        )
