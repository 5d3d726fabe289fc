"""A replica of a service: it predicts with the published versions, and learns nothing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from streamiter.service.settings.features import FeatureRows
from streamiter.service.settings.file import SettingChange, changed
from streamiter.service.settings.tables import ServiceSettings
from streamiter.service.surfaces import ServiceSurfaces
from streamiter.values.helpers.clock import Clock

_log = logging.getLogger("streamiter.service")


class ServiceReplica(ServiceSurfaces):
    """Answers as a service of the same settings does, from its published versions alone.

    It reads neither the input nor checkpoints, so any number of replicas may run beside the service, behind a load
    balancer. While the service is away, they answer with its last version. ``/readyz`` tells when a replica has a
    version; flow and checkpoints, which it does not have, are unknown on its page and in its metrics::

        raise SystemExit(ServiceReplica(read_settings("service.toml")).run())
    """

    def __init__(self, settings: ServiceSettings, *, clock: Clock | None = None) -> None:
        super().__init__(settings, FeatureRows(settings.learn), role="replica", clock=clock)

    async def _work(self) -> int:
        """Follow until a signal ends the process."""
        self.observations.follow()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    def _end_of_wait(self) -> None:
        _log.info("the replica ends; other replicas, and the service, go on")
        self.observations.enter("finished")

    def _changes(self, settings: ServiceSettings) -> list[SettingChange]:
        changes = changed(self.settings, settings)
        before, given = self.settings, settings.publish
        self.settings = replace(
            before,
            log=replace(settings.log, format=before.log.format),
            health=settings.health,
            publish=replace(before.publish, every_s=given.every_s, records=given.records),
        )
        return changes
