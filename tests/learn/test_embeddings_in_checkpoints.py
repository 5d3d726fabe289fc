"""A training with embeddings keeps a large table of features as base and changes, and goes on with the same bits."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from learn.embedded_streams import EXPIRING, labels_of, views
from learn.frozen_states import frozen
from support.waiting import until

from streamiter import Checkpoints, Flow
from streamiter.learn import train_online
from streamiter.models import ModelSnapshot
from streamiter.operators import Context, Positions, Source, SourceBatch
from streamiter.parameter_server.storage.feature_files import FeatureFiles

RECORDS = [record | {"bought": label} for record, label in zip(views(1_200), labels_of(views(1_200)), strict=True)]
for record, verdict in zip(RECORDS, labels_of(RECORDS, "classes"), strict=True):
    record["verdict"] = verdict
RECORDS[1_120]["verdict"] = "a class that comes late"


class Views(Source):
    """Gives the records up to a limit, then waits."""

    bounded = False
    limit = 0
    is_waiting = False

    def open(self, context: Context, positions: Positions | None) -> None:
        self._at = (positions or {}).get("at", 0)

    async def read(self) -> SourceBatch | None:
        if self._at == self.limit:
            type(self).is_waiting = True
            await asyncio.Event().wait()
        first, self._at = self._at, self._at + 50
        return SourceBatch(RECORDS[first : self._at], {"at": self._at})


async def learn(folder: Path, label: str, limit: int, seen: list[ModelSnapshot]) -> None:
    """Learn the records up to a limit, from the last checkpoint on; ``seen`` gets the versions."""
    Views.limit, Views.is_waiting = limit, False
    flow = Flow("views")
    options: dict[str, Any] = {
        "label": label,
        "features": ["user", "item", "tags", "price", "shop"],
        "embeddings": EXPIRING,
        "shapes": False,
        "mini_batch": 50,
    }
    training = train_online(flow.from_source(Views, name="views"), **options)
    training.models.map(seen.append, name="seen").collect(name="nothing")
    job = await flow.start(checkpoints=Checkpoints(folder, interval_s=3600))
    await until(lambda: Views.is_waiting, patience_s=60)
    await job.stop("suspend")


@pytest.mark.parametrize("label", ["bought", "verdict"])
async def test_a_training_goes_on_from_base_and_changes(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint of a model with embeddings copied its table, which doubled the memory of the process; a class
    that comes late makes another table, whose files are new.
    """
    monkeypatch.setitem(FeatureFiles.__init__.__kwdefaults__, "features_of_file", 20)
    at_once: list[ModelSnapshot] = []
    await learn(tmp_path / "at once", label, 1_200, at_once)
    in_parts: list[ModelSnapshot] = []
    for limit in (600, 1_150, 1_200):
        await learn(tmp_path / "in parts", label, limit, in_parts)
    files = sorted((tmp_path / "in parts").rglob("*.shared"))
    assert len(files) > 4
    assert {each.name.partition("-")[0] for each in files} >= {"0000000002", "0000000003"}
    assert frozen(in_parts[-1].parameters) == frozen(at_once[-1].parameters)
