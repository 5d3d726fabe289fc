"""The challenger of a service as the surfaces see it: its last version, its figures, and its share of the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamiter.learn.challengers import ComparedRows
from streamiter.models import ServedModel
from streamiter.models.served import ServedVersion
from streamiter.service.settings import ChallengerSettings
from streamiter.values.named_rows import hash_of


@dataclass(frozen=True, slots=True)
class Challenger:
    """Follows the versions that the challenger publishes under its own name."""

    name: str
    served: ServedModel
    settings: ChallengerSettings

    @property
    def compared(self) -> ComparedRows | None:
        """The comparison with the champion that the last version tells; None before the first one."""
        return None if self.served.update is None else ComparedRows.of(self.served.update.metrics)

    def version_for(self, row: object) -> ServedVersion | None:
        """Return the version of the challenger if it answers for a row; None if the service itself does.

        The hash of the key decides, so a key always gets the same learner. Rows without a key, and all rows before the
        challenger has a version, are those of the service itself.
        """
        share, key = self.settings.share, self.settings.key
        if share is None or key is None or not isinstance(row, Mapping) or self.served.update is None:
            return None
        value: Any = row.get(key)
        # Another challenger gets other keys.
        is_taken = value is not None and hash_of(f"{self.name}:{value}".encode()) < share * 2.0**64
        return self.served.version_now() if is_taken else None
