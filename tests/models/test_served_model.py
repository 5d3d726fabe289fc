"""A served model handles its first model, newer models, ages, bad updates, outages, and the end of its topic."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models.model_case import MakeTopic, ManualClock, encoder, memory_topic, update_of, write
from support.waiting import until

from streamiter.errors import ModelError, TopicNotFound, TopicUnavailable
from streamiter.learn import FeatureHasher, LogisticRegression
from streamiter.models import ModelUpdateEncoder, NoModel, Prediction, ServedModel
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import ReadRequest, Topic, TopicBatch, TopicReader


def version_of(served: ServedModel) -> int | None:
    return served.statistics().version


async def test_a_prediction_names_the_version_it_was_computed_with(make_topic: MakeTopic) -> None:
    """Without the version, the model of a disputed prediction would be unknown."""
    clock = ManualClock()
    topic = await make_topic()
    await write(topic, encoder(3, 7, clock=clock).encode([{"weights": np.array([2.0, 0.0]), "intercept": 1.0}]))
    clock.advance(2.5)
    async with ServedModel(topic, "ctr", clock=clock) as served:
        await served.ready()
        assert served.predict([4.0, 9.0]) == Prediction(9.0, generation=3, version=7, age_s=2.5)
        clock.advance(60)
        assert served.predict([4.0, 9.0]).age_s == 62.5


async def test_versions_change_while_predicting_and_never_go_back(make_topic: MakeTopic) -> None:
    """Value and version of an answer must belong to the same model at any moment."""
    topic = await make_topic()
    await write(topic, update_of((1, 1)))
    versions: list[int] = []
    async with ServedModel(topic, "ctr") as served:
        await served.ready()

        async def publish() -> None:
            for version in (2, 3, 2, 5, 4, 6):
                await write(topic, update_of((1, version)))
                await asyncio.sleep(0)

        publishing = asyncio.create_task(publish())
        while not versions or versions[-1] < 6:
            prediction = served.predict(np.array([[1.0], [10.0]]))
            assert prediction.value.tolist() == [prediction.version, 10.0 * prediction.version]
            versions.append(prediction.version)
            await asyncio.sleep(0)
        await publishing
    assert versions == sorted(versions)
    assert versions[0] == 1
    assert served.statistics().updates >= 2


async def test_rows_of_a_hasher_are_predicted_as_by_the_model_itself() -> None:
    """A server refused rows that its own model had learned from, with an error about numbers without a len()."""
    hasher = FeatureHasher(["color"], numeric=["size"], bits=6)
    records = [{"color": color, "size": size} for color in ("red", "blue") for size in (0.5, -1.0, 2.0)]
    rows = hasher.rows(records)
    model = LogisticRegression(hasher.width)
    model.learn(rows, [1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    topic = await memory_topic(encoder(1, 1).encode([model.parameters()]))
    async with ServedModel(topic, "ctr") as served:
        await served.ready()
        assert served.predict(rows).value == pytest.approx(model.predict(rows), rel=1e-15)
        assert [served.predict(row).value for row in rows] == served.predict(rows).value.tolist()
        with pytest.raises(ModelError, match=r"model 'ctr' .*: expected sparse rows of width 64, given width 32"):
            served.predict(FeatureHasher(["color"], bits=5).rows(records))


async def test_rows_wait_for_the_first_model(make_topic: MakeTopic) -> None:
    """A service that starts before the first training run is over must not refuse its first requests."""
    topic = await make_topic()
    async with ServedModel(topic, "ctr") as served:
        waiting = [asyncio.create_task(served.predict_when_ready([float(row)])) for row in range(3)]
        await until(lambda: served.statistics().waiting == 3)
        await write(topic, update_of((1, 2)))
        predictions = await asyncio.gather(*waiting)
        assert [prediction.value for prediction in predictions] == [0.0, 2.0, 4.0]
        assert served.statistics().waiting == 0


async def test_before_the_first_model_predict_raises_at_once() -> None:
    """A caller that does not wait must get an error of a class of its own."""
    topic = await memory_topic()
    served = ServedModel(topic, "ctr")
    with pytest.raises(NoModel, match=r"model 'ctr' of memory://models: following has not begun; use the model inside"):
        served.predict([1.0])
    with pytest.raises(NoModel, match="use the model inside"):
        await served.ready()
    async with served:
        with pytest.raises(NoModel, match=r"no model yet; await ready\(\) first"):
            served.predict([1.0])
        with pytest.raises(ModelError, match="entered once"):
            await served.__aenter__()


async def test_waiting_ends_after_the_time_given() -> None:
    """A request must not wait for ever if the training never publishes."""
    clock = ManualClock()
    async with ServedModel(await memory_topic(), "ctr", clock=clock) as served:
        waiting = asyncio.create_task(served.predict_when_ready([1.0], timeout_s=5))
        await until(lambda: served.statistics().waiting == 1)
        clock.advance(4.9)
        await asyncio.sleep(0)
        assert not waiting.done()
        clock.advance(0.1)
        with pytest.raises(NoModel, match="no model after 5 s; check the name"):
            await waiting
        assert served.statistics().waiting == 0
        assert clock.timers == 0


async def test_the_number_of_waiting_rows_is_bounded_and_a_cancelled_one_leaves() -> None:
    """Requests accumulated without a limit while no model was available."""
    async with ServedModel(await memory_topic(), "ctr", waiting_max=2) as served:
        waiting = [asyncio.create_task(served.ready()) for _ in range(2)]
        await until(lambda: served.statistics().waiting == 2)
        with pytest.raises(NoModel, match="no model yet, and 2 calls wait for it already"):
            await served.ready()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert served.statistics().waiting == 0


async def test_waiting_ends_when_the_model_is_closed() -> None:
    """At shutdown, no request may continue to wait."""
    async with ServedModel(await memory_topic(), "ctr") as served:
        waiting = asyncio.create_task(served.ready())
        await until(lambda: served.statistics().waiting == 1)
    with pytest.raises(NoModel, match="the ServedModel was closed while the call waited"):
        await waiting


async def test_a_users_predictor_gets_parameters_and_rows() -> None:
    """k-means is not linear, so it needs the user's predictor."""
    topic = await memory_topic(encoder().encode([{"centroids": np.array([0.0, 10.0])}]))

    def nearest(parameters: Any, x: float) -> int:
        return int(np.argmin(np.abs(parameters["centroids"] - x)))

    async with ServedModel(topic, "ctr", predict=nearest) as served:
        await served.ready()
        assert [served.predict(x).value for x in (1.0, 9.0)] == [0, 1]


async def test_bad_updates_leave_the_last_good_model_in_service(make_topic: MakeTopic) -> None:
    """One record written by hand stopped every prediction service that followed the topic."""
    topic = await make_topic()
    await write(topic, update_of((1, 1)))
    async with ServedModel(topic, "ctr") as served:
        await served.ready()
        await write(topic, replace(update_of((1, 2)), values=[b"{"]))
        await until(lambda: served.statistics().failed == 1)
        assert "expected an update of model 'ctr'" in (served.statistics().last_error or "")
        await write(topic, encoder(1, 3).encode([{"centroids": np.ones(1)}]))  # readable, but not linear
        await until(lambda: served.statistics().failed == 2)
        assert "update 1.3: expected the parameters of a linear model, given centroids" in (
            served.statistics().last_error or ""
        )
        assert served.predict([5.0]).version == 1
        served.check()  # the server still follows the topic
        await write(topic, update_of((1, 2)), update_of((1, 4)))
        await until(lambda: version_of(served) == 4)
        statistics = served.statistics()
        assert (statistics.updates, statistics.skipped, statistics.failed) == (2, 1, 2)


async def test_a_version_that_load_cannot_use_leaves_the_last_good_model_in_service() -> None:
    """A version without the entry that load read ended following for good, and no later one was served."""
    topic = await memory_topic()

    def load(parameters: Any) -> Any:
        factor = parameters["factor"]
        return lambda x: factor * x

    async with ServedModel(topic, "ctr", load=load) as served:
        await write(topic, encoder(1, 1).encode([{"factor": 2.0}]))
        await served.ready()
        await write(topic, encoder(1, 2).encode([{"other": 1.0}]))
        await until(lambda: served.statistics().failed == 1)
        assert "update 1.2: load has raised KeyError('factor')" in (served.statistics().last_error or "")
        assert served.predict(1.0).value == 2.0
        await write(topic, encoder(1, 3).encode([{"factor": 3.0}]))
        await until(lambda: version_of(served) == 3)


async def test_a_deleted_topic_is_reported_by_check_and_at_the_end_while_the_last_model_predicts() -> None:
    """The topic was deleted by mistake; for weeks the service used an old model, without an error."""
    topic = await memory_topic(update_of((1, 1)))
    served = ServedModel(topic, "ctr")

    async def serve() -> None:
        async with served:
            await served.ready()
            await topic.delete()
            await until(lambda: not served.statistics().is_following)
            assert served.predict([2.0]).value == 2.0
            assert "was deleted" in (served.statistics().last_error or "")

    with pytest.raises(ModelError, match="following has ended, so predictions become outdated: topic 'models' was del"):
        await serve()
    with pytest.raises(ModelError, match="following has ended") as caught:
        served.check()
    assert isinstance(caught.value.__cause__, TopicNotFound)


async def test_a_topic_that_was_created_again_during_an_outage_is_reported_by_check(make_topic: MakeTopic) -> None:
    """The new topic's updates began with generation 1, were older than the served model, and were skipped."""
    clock = ManualClock()
    made = await make_topic()
    await write(made, update_of((5, 1)))
    flaky = FlakyTopic(made)
    async with ServedModel(flaky, "ctr", clock=clock) as served:  # type: ignore[arg-type]
        await served.ready()
        flaky.switch_off()
        await until(lambda: not served.statistics().is_following)
        await made.delete()
        await make_topic()
        await write(made, update_of((1, 2)))
        flaky.switch_on()
        clock.advance(1.0)
        await until(lambda: not clock.timers and "created again" in (served.statistics().last_error or ""))
        assert served.predict([2.0]).generation == 5
        with pytest.raises(ModelError, match=r"following has ended.*was deleted and created again"):
            served.check()


async def test_an_error_that_check_has_raised_is_not_raised_again_at_the_end() -> None:
    """A service that has handled the error must be able to shut down without a second error."""
    topic = await memory_topic()
    async with ServedModel(topic, "ctr") as served:
        await until(lambda: served.statistics().is_following)
        await topic.delete()
        await until(lambda: not served.statistics().is_following)
        with pytest.raises(ModelError, match="following has ended"):
            served.check()


async def test_a_missing_topic_ends_waiting_at_once() -> None:
    """Waiting thirty seconds for a missing topic is useless."""
    served = ServedModel(MemoryBroker().topic("models"), "ctr")
    with pytest.raises(NoModel, match=r"no model.*no topic 'models' in memory"):
        async with served:
            await served.ready()
    assert not served.statistics().is_following


class FlakyTopic:
    """The real topic on a server that a test can switch off."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self.is_down = False
        self.down = asyncio.Event()
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topic, name)

    def switch_off(self) -> None:
        self.is_down = True
        self.down.set()

    def switch_on(self) -> None:
        self.is_down = False
        self.down.clear()

    async def describe(self) -> Any:
        self.check()
        return await self._topic.describe()

    async def open_reader(self, request: ReadRequest) -> TopicReader:
        self.check()
        return _FlakyReader(self, await self._topic.open_reader(request))

    def check(self) -> None:
        if self.is_down:
            self.refused += 1
            raise TopicUnavailable("the server does not answer")


class _FlakyReader(TopicReader):
    def __init__(self, topic: FlakyTopic, reader: TopicReader) -> None:
        self._topic = topic
        self._reader = reader

    async def read(self) -> TopicBatch | None:
        self._topic.check()
        reading = asyncio.ensure_future(self._reader.read())
        down = asyncio.ensure_future(self._topic.down.wait())
        try:
            await asyncio.wait([reading, down], return_when=asyncio.FIRST_COMPLETED)
            self._topic.check()
            return reading.result()
        finally:
            for task in (reading, down):
                task.cancel()
            await asyncio.wait([reading, down])

    def positions(self) -> Any:
        return self._reader.positions()

    def identities(self) -> Any:
        return self._reader.identities()

    def lag(self) -> Any:
        return self._reader.lag()

    async def close(self) -> None:
        await self._reader.close()


async def test_an_outage_is_reported_and_followed_by_the_newest_model() -> None:
    """A restart of the broker must neither end serving nor leave the server with an old model."""
    clock = ManualClock()
    topic = await memory_topic()
    flaky = FlakyTopic(topic)
    await write(topic, update_of((1, 1)))
    async with ServedModel(flaky, "ctr", clock=clock) as served:  # type: ignore[arg-type]
        await served.ready()
        flaky.switch_off()
        await until(lambda: clock.timers == 1)
        assert not served.statistics().is_following
        with pytest.raises(ModelError, match="the topic does not answer, trying again: the server does not answer"):
            served.check()
        assert served.predict([1.0]).version == 1
        refused = flaky.refused
        clock.advance(1)
        await until(lambda: flaky.refused == refused + 1 and clock.timers == 1)
        await write(topic, *(update_of((1, version)) for version in range(2, 9)))
        flaky.switch_on()
        clock.advance(1)
        await until(lambda: version_of(served) == 8)
        served.check()
        assert served.statistics().is_following
        assert served.statistics().updates == 2


async def test_an_outage_never_takes_a_model_back() -> None:
    """After a reconnection, the last update was from a superseded writer, and the server used a model one day older."""
    clock = ManualClock()
    topic = await memory_topic(settings={"retention_records": "2"})
    flaky = FlakyTopic(topic)
    await write(topic, update_of((2, 1)))
    async with ServedModel(flaky, "ctr", clock=clock) as served:  # type: ignore[arg-type]
        await served.ready()
        flaky.switch_off()
        await until(lambda: clock.timers == 1)
        await write(topic, update_of((1, 499)), update_of((1, 500)))  # retention has deleted all other records
        flaky.switch_on()
        clock.advance(1)
        await until(lambda: served.statistics().is_following)
        await write(topic, update_of((1, 501)), update_of((2, 2)))
        await until(lambda: version_of(served) == 2)
        assert served.statistics().generation == 2
        assert served.statistics().updates == 2


async def test_the_age_is_never_negative() -> None:
    """A publisher whose clock is ahead must not give a model a negative age."""
    clock = ManualClock()
    topic = await memory_topic()
    ahead = ModelUpdateEncoder("ctr", 1, clock=ManualClock(clock.monotonic_s() + 60))
    await write(topic, ahead.encode([np.ones(1)]))
    async with ServedModel(topic, "ctr", clock=clock) as served:
        await served.ready()
        assert served.predict([1.0]).age_s == 0.0
        assert served.statistics().age_s == 0.0


async def test_an_error_of_the_body_is_not_hidden_by_the_end() -> None:
    """The service must see its own error, and not the error about the deleted topic."""
    topic = await memory_topic()

    async def serve() -> None:
        async with ServedModel(topic, "ctr") as served:
            await until(lambda: served.statistics().is_following)
            await topic.delete()
            await until(lambda: not served.statistics().is_following)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await serve()
