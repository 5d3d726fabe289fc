"""Followers with a folder: rows on disk, each version as it was published, after any end of the process."""

import json
import re
import shutil
from pathlib import Path
from random import Random
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from checkpoints.test_directory_store_full_disk import SmallDisk, fill
from models.folder_cases import (
    CASES,
    TESTS,
    assert_equal,
    caught_up,
    follower_command,
    learner_versions,
    network_versions,
    rows_of,
    stored_in,
    whole,
)
from models.model_case import WatchedTopic, encoder, memory_topic, same, selected, write
from support.processes import async_process
from support.waiting import until

from streamiter.errors import ConfigurationError, ModelError, StorageFull
from streamiter.models import ServedModel, roll_back
from streamiter.networks import ServedNetwork
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import Topic
from streamiter.topics.urls import topic as topic_of


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


async def assert_follows(model: type[ServedModel], topic: Topic, folder: Path, rank: tuple[int, int]) -> None:
    """A follower with the folder gets to a version, and so does one in memory."""
    async with model(topic, "ctr") as memory, model(topic, "ctr", folder=folder) as served:
        await caught_up(memory, rank)
        await caught_up(served, rank)
        assert_equal(served, memory)


@pytest.mark.parametrize(("model", "versions"), CASES)
@pytest.mark.parametrize("changes", [True, False])
async def test_a_follower_with_a_folder_equals_one_in_memory_at_each_version(
    tmp_path: Path, model: type[ServedModel], versions: Any, changes: bool
) -> None:
    """A row of the version before was read from disk, and nobody saw it in the predictions."""
    one, made = encoder(changes=changes, record_bytes_max=3000), versions()
    topic = await memory_topic(one.encode([next(made)]))
    async with model(topic, "ctr") as memory:
        for first in (1, 9):
            async with model(topic, "ctr", folder=tmp_path) as served:
                for version in range(first, first + 8):
                    await caught_up(memory, (1, version))
                    await caught_up(served, (1, version))
                    assert_equal(served, memory)
                    await write(topic, one.encode([next(made)]))
                assert served.statistics().failed == 0


async def test_a_long_chain_begins_again_in_the_folder(tmp_path: Path) -> None:
    """A start applied a thousand changes, one by one, to lists of a million keys."""
    one, made = encoder(changes=True), network_versions(2000)
    topic = await memory_topic(one.encode([next(made)]))
    async with ServedNetwork(topic, "ctr", folder=tmp_path) as served:
        for version in range(2, 90):
            await write(topic, one.encode([next(made)]))
            await caught_up(served, (1, version))
        assert served._folder is not None
        assert served._folder._changes < 64
    await assert_follows(ServedNetwork, topic, tmp_path, (1, 89))


async def test_an_earlier_version_keeps_its_rows(tmp_path: Path) -> None:
    """An answer in a thread had rows of two versions, or rows that a whole version had replaced."""
    one, made = encoder(changes=True), network_versions()
    topic = await memory_topic(one.encode([next(made)]))
    async with ServedNetwork(topic, "ctr", folder=tmp_path) as served:
        await served.ready()
        held = []
        for version in range(1, 9):
            now, rows = served.version_now(), rows_of(ServedNetwork)
            held.append((now, now.predict(rows), whole(now.update.parameters)))
            again = one if version != 4 else encoder(2, changes=True)
            one = again
            await write(topic, again.encode([next(made)]))
            await until(lambda now=now: served.version_now() is not now)  # type: ignore[misc]
        for now, predictions, parameters in held:
            assert same(now.predict(rows), predictions)
            assert same(whole(now.update.parameters), parameters)


async def test_tables_that_no_version_names_leave_the_disk(tmp_path: Path) -> None:
    """Each whole version left its rows on the disk, until it was full."""
    one, made = encoder(), network_versions(20_000)
    topic = await memory_topic(one.encode([next(made)]))
    async with ServedNetwork(topic, "ctr", folder=tmp_path) as served:
        for version in range(2, 20):
            await caught_up(served, (1, version - 1))
            await write(topic, one.encode([next(made)]))
        await caught_up(served, (1, 19))
    assert bytes_in(tmp_path) < 12 * 20_000 * 8 * 4 / 3


# ---- restarts


@pytest.mark.parametrize(("model", "versions"), CASES)
async def test_a_restart_reads_only_what_came_after_the_version_on_disk(
    tmp_path: Path, model: type[ServedModel], versions: Any
) -> None:
    """After each restart a follower read the whole model from its topic again."""
    one, made = encoder(changes=True, record_bytes_max=1000), versions()
    topic = await memory_topic(one.encode([next(made) for _ in range(6)]))
    await assert_follows(model, topic, tmp_path, (1, 6))
    later = one.encode([next(made) for _ in range(3)])
    await write(topic, later)
    watched = WatchedTopic(topic)
    async with model(watched, "ctr", folder=tmp_path) as served:  # type: ignore[arg-type]
        await caught_up(served, (1, 9))
    assert watched.records_read == len(later)
    await assert_follows(model, topic, tmp_path, (1, 9))


@pytest.mark.parametrize(("model", "versions"), CASES)
async def test_a_killed_follower_goes_on_from_the_version_on_disk(
    tmp_path: Path, model: type[ServedModel], versions: Any
) -> None:
    """A follower was killed while it wrote a version, and predicted with rows of two versions after its restart."""
    topic, random, made = topic_of(f"sqlite:///{tmp_path}/topics.db?topic=models"), Random(3), versions()
    await topic.create()
    one, version, told = encoder(changes=True, record_bytes_max=4000), 1, [(0, 0)]
    await write(topic, one.encode([next(made)]))
    async with model(topic, "ctr") as memory:
        for kill in range(6):
            command = follower_command(model, topic, tmp_path / "folder")
            async with async_process(command, is_forked=True, stdout=PIPE, cwd=TESTS) as running:
                ends = version + random.randrange(1, 6)
                while version < ends or kill == 5:
                    line = json.loads(await running.stdout.readline())
                    told.append(tuple(line["rank"]))
                    await caught_up(memory, told[-1])
                    if memory.update is not None and memory.update.rank == told[-1]:
                        assert line["values"] == memory.predict(rows_of(model)).value.tolist()
                    if kill == 5 and told[-1] == (1, version):
                        break
                    version += 1
                    await write(topic, one.encode([next(made)]))
                for _ in range(random.randrange(3)):
                    version += 1
                    await write(topic, one.encode([next(made)]))
                running.kill()
    assert told[-1] == (1, version)
    await assert_follows(model, topic, tmp_path / "folder", (1, version))


async def test_a_gap_is_known_and_the_base_is_loaded_again(tmp_path: Path) -> None:
    """A follower applied a change to an earlier version than the one that it was made of."""
    one, made = encoder(changes=True), network_versions()
    topic = await memory_topic(one.encode([next(made) for _ in range(5)]))
    await assert_follows(ServedNetwork, topic, tmp_path, (1, 5))
    one.encode([next(made)])
    await write(topic, one.encode([next(made)]))
    async with ServedNetwork(topic, "ctr") as memory, ServedNetwork(topic, "ctr", folder=tmp_path) as served:
        await caught_up(served, (1, 5))
        await caught_up(memory, (1, 5))
        assert_equal(served, memory)
        assert served.statistics().last_error == memory.statistics().last_error
        assert "is a change of update 1.6, and the last one read is 1.5" in str(served.statistics().last_error)
        await write(topic, encoder(2, changes=True).encode([next(made), next(made)]))
        await caught_up(served, (2, 2))
        await caught_up(memory, (2, 2))
        assert_equal(served, memory)


async def test_an_update_that_is_incomplete_at_the_end_is_read_again(tmp_path: Path) -> None:
    """The first chunks of a version came before the follower was killed, the last ones after it."""
    one, made = encoder(changes=True, record_bytes_max=1000), network_versions()
    topic = await memory_topic(one.encode([next(made), next(made)]))
    following = encoder(2, changes=True, record_bytes_max=1000).encode([next(made)])
    await write(topic, selected(following, 0, 1), one.encode([next(made)]))
    await assert_follows(ServedNetwork, topic, tmp_path, (1, 3))
    await write(topic, selected(following, *range(2, len(following))))
    await assert_follows(ServedNetwork, topic, tmp_path, (2, 1))


async def test_a_compacted_topic_is_followed_from_any_version_on_disk(tmp_path: Path) -> None:
    """The broker had dropped the changes between the version on disk and the next base."""
    topic = MemoryBroker().topic("models")
    await topic.create(settings={"compact": "1"})
    one, made = encoder(changes=True, record_bytes_max=3000), network_versions(60)
    version = 0
    for count in (1, 2, 9, 30, 3, 40):
        await write(topic, *(one.encode([next(made)]) for _ in range(count)))
        version += count
        await assert_follows(ServedNetwork, topic, tmp_path, (1, version))


@pytest.mark.parametrize(("model", "versions"), CASES)
async def test_a_roll_back_works(tmp_path: Path, model: type[ServedModel], versions: Any) -> None:
    """A follower with a folder stayed at the version that was rolled back."""
    one, made = encoder(changes=True), versions()
    topic = await memory_topic(one.encode([next(made) for _ in range(4)]))
    async with model(topic, "ctr") as memory, model(topic, "ctr", folder=tmp_path) as served:
        await caught_up(served, (1, 4))
        update = await roll_back(topic, "ctr", "1.2")
        await caught_up(memory, update.rank)
        await caught_up(served, update.rank)
        assert_equal(served, memory)
    await roll_back(topic, "ctr", "1.3")
    await assert_follows(model, topic, tmp_path, (3, 1))


async def test_a_topic_that_was_created_again_is_loaded_anew(tmp_path: Path) -> None:
    """The folder had a later version than the new topic, so the follower skipped all of a new training."""
    topic, made = await memory_topic(encoder(7, changes=True).encode([next(network_versions())])), network_versions()
    await assert_follows(ServedNetwork, topic, tmp_path, (7, 1))
    await topic.delete()
    await topic.create()
    await write(topic, encoder(changes=True).encode([next(made), next(made)]))
    await assert_follows(ServedNetwork, topic, tmp_path, (1, 2))


# ---- refusals


@pytest.mark.parametrize(("model", "versions"), CASES)
async def test_a_follower_goes_on_when_its_full_disk_has_room_again(
    small_disk: SmallDisk, model: type[ServedModel], versions: Any
) -> None:
    """A follower took over no version any more, although room was made, and its end was an error of its folder."""
    (disk, enlarge), one, made, version = small_disk, encoder(changes=True), versions(), 1
    topic, folder = await memory_topic(one.encode([next(made)])), disk / "model"
    async with model(topic, "ctr") as memory, model(topic, "ctr", folder=folder) as served:
        await caught_up(served, (1, 1))
        fill(disk)
        while (error := served.statistics().last_error) is None:
            version += 1
            await write(topic, one.encode([next(made)]))
            await until(lambda: served.statistics().last_error or served.update.rank == (1, version))  # type: ignore[union-attr] # noqa: B023
        said = f"model 'ctr' of memory://models: expected to read and write its rows in {folder}, given "
        assert error.startswith(said)
        assert "No space left on device" in error
        assert error.endswith("then a follower that runs goes on, and one that could not start is started again")
        with pytest.raises(ModelError, match="its disk is full, trying again"):
            served.check()
        before = served.predict(rows_of(model)).value
        with pytest.raises(StorageFull, match=re.escape(said)):
            await model(topic, "ctr", folder=folder).__aenter__()
        for _ in range(3):  # Each second one of these is tried.
            version += 1
            await write(topic, one.encode([next(made)]))
        await caught_up(memory, (1, version))
        assert same(served.predict(rows_of(model)).value, before)
        assert enlarge()
        await caught_up(served, (1, version))
        assert_equal(served, memory)
        fill(disk)
    (disk / "filler").unlink()
    await assert_follows(model, topic, folder, (1, version))


async def what_is_wrong(topic: Topic, folder: Path) -> str | None:
    try:
        async with ServedModel(topic, "ctr", folder=folder) as served:
            await served.ready()
            for rows in stored_in(served.version_now().update.parameters):
                rows[np.arange(len(rows))]
    except ModelError as error:
        return str(error)
    return None


async def test_a_damaged_folder_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """A disk had lost a file, and the message was RocksDB's."""
    topic = await memory_topic(encoder(changes=True).encode([next(learner_versions())]))
    await assert_follows(ServedModel, topic, tmp_path / "model", (1, 1))
    random = Random(1)
    for name in ("MANIFEST-*", "CURRENT", "*.sst", "*.log"):
        for number in range(2):
            copy = tmp_path / f"{name[:3]}{number}".replace("*", "any")
            shutil.copytree(tmp_path / "model", copy)
            for file in copy.glob(name):
                content = bytearray(file.read_bytes())
                for _ in range(min(len(content), 30)):
                    content[random.randrange(len(content))] ^= 255
                file.write_bytes(content)
            message = await what_is_wrong(topic, copy)
            if message is None:  # The log of the last version was lost, or what is damaged is not read.
                assert name in ("*.log", "CURRENT")
            else:
                assert message.startswith(
                    f"model 'ctr' of memory://models: expected to read and write its rows in {copy}, given "
                )
                assert message.endswith("delete the folder and start again, then the model is loaded from its topic")
                shutil.rmtree(copy)
            await assert_follows(ServedModel, topic, copy, (1, 1))


async def test_a_folder_that_is_not_free_is_refused(tmp_path: Path) -> None:
    """Two followers wrote into one folder, or over the files of a user."""
    topic = await memory_topic(encoder().encode([next(learner_versions())]))
    for name, content in {"notes": "notes.txt", "used": None}.items():
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / content).touch()
    used = tmp_path / "used"
    async with ServedModel(topic, "ctr", folder=used) as served:
        await served.ready()
        with pytest.raises(ModelError, match=r"given another process, or another ServedModel .* a folder of its own"):
            await ServedModel(topic, "ctr", folder=used).__aenter__()
    with pytest.raises(ModelError, match=r"'ctr' of memory://models; choose another folder, or delete this one"):
        await ServedModel(topic, "other", folder=used).__aenter__()
    await assert_follows(ServedModel, topic, used, (1, 1))
    with pytest.raises(ModelError, match=r"given .*notes with other files; choose another folder"):
        await ServedModel(topic, "ctr", folder=tmp_path / "notes").__aenter__()
    with pytest.raises(ConfigurationError, match="expected folder= without predict= and load="):
        ServedModel(topic, "ctr", folder=used, predict=lambda _, x: x)
