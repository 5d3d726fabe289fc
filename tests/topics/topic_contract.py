"""The contract of topics: the behaviour of every connector, as a class of checks to inherit from.

A connector's test module makes a `TopicCase` in a fixture named ``case`` and inherits the checks::

    from topics.topic_contract import TopicCase, TopicContract

    class TestMyTopics(TopicContract):
        @pytest.fixture
        async def case(self, tmp_path):
            yield TopicCase(handle=lambda name: topic(f"mine://{tmp_path}/{name}"))

The checks do not know any connector; a field of the case says what only some connectors can do.
"""

from topics.contract_last_value import CommitTopicContract, LastValueContract
from topics.contract_lifecycle import LifecycleContract
from topics.contract_range import RangeContract
from topics.contract_reading import ReadingContract
from topics.contract_transactions import TransactionsContract
from topics.contract_writing import WritingContract
from topics.topic_case import TopicCase

__all__ = ["TopicCase", "TopicContract"]


class TopicContract(
    WritingContract,
    RangeContract,
    ReadingContract,
    TransactionsContract,
    LastValueContract,
    CommitTopicContract,
    LifecycleContract,
):
    """All checks of the contract; a test class inherits from it and has a fixture ``case``."""
