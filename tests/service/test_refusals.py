"""Files of a service that are refused, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/service/test_refusals.py`` writes the texts as they are now.
"""

from pathlib import Path
from typing import Any

from service.test_settings_file import GOOD
from support.refusals import refusals_test, write

from streamiter.service.settings.file import read_settings

FILE = Path(__file__).with_name("refusals.txt")
SHORT = """
service.name = "s"
input.topic = "memory://in"
publish.topic = "memory://out"
[learn]
label = { field = "late" }
"""
REMOTE = 'address = "0.0.0.0:8080"'
LABEL = 'label = { event = "arrival", key = "flight", value = "delay > 15", within = "36h" }'


async def of_learn(code: str) -> object:
    return read_settings(f"{SHORT}{eval(code)}\n").learn


async def of_input(code: str) -> object:
    text = SHORT.replace('input.topic = "memory://in"', f"input = {eval(code)}")
    return read_settings(f'{text}kind = "classification"\n').input.at


async def of_the_address(code: str) -> object:
    keys = eval(code, {"REMOTE": REMOTE})
    text = GOOD.replace('address = "127.0.0.1:8080"', keys).replace("\nbehind_proxy = false", "")
    return read_settings(text).http.requests_max


async def of_the_label(code: str) -> object:
    label, kind = eval(code)
    text = GOOD.replace(LABEL, f"label = {label}").replace('kind = "classification"', f'kind = "{kind}"')
    return read_settings(text).learn


async def of_a_challenger(code: str) -> object:
    """Read a file whose challenger's file, and table ``challenger``, have these changes; ... removes a topic."""
    first: dict[str, Any] = {
        "service": {"name": "late"},
        "input": {"topic": "memory://in"},
        "publish": {"topic": "memory://out"},
        "learn": {"kind": "regression", "label": {"field": "delay"}},
    }
    second, table, own = eval(code)
    first |= {name: first.get(name, {}) | keys for name, keys in own.items()}
    other = {**first, "service": {"name": "late-b"}}
    other |= {name: other.get(name, {}) | keys for name, keys in second.items()}
    other["input"] = {name: value for name, value in other["input"].items() if value is not ...}
    return read_settings({**first, "challenger": {"file": other, **table}}).challenger.after


async def of_tables(code: str) -> object:
    """Read a file with these keys by table, or a text."""
    given = eval(code)
    tables: dict[str, Any] = {
        "service": {"name": "late"},
        "input": {"topic": "memory://in"},
        "publish": {"topic": "memory://out"},
        "learn": {"kind": "classification", "label": {"field": "late"}},
    }
    if isinstance(given, dict):
        given = {name: tables.get(name, {}) | given.get(name, {}) for name in {**tables, **given}}
    return read_settings(given).name


CALLS = {
    "the table learn, of a file with little else": of_learn,
    "the table input, of a file with little else": of_input,
    "the address, of a file that is complete": of_the_address,
    "the label and its kind, of a file that is complete": of_the_label,
    "the other tables, of a file with little else, and texts": of_tables,
    "the file of a challenger, the table challenger, and the file with it": of_a_challenger,
}


test_wrong_settings_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
