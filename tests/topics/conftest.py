"""A failed assert in the shared checks shows its values, as in a test module."""

import pytest

pytest.register_assert_rewrite(
    "topics.contract_lifecycle",
    "topics.contract_range",
    "topics.contract_reading",
    "topics.contract_transactions",
    "topics.contract_writing",
    "topics.topic_case",
)
