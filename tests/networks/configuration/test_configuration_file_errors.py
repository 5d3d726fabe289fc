"""A file that is no configuration is refused with a clear error."""

import pytest
from networks.configuration.refusals import of_file, refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"layers": [', "expected JSON, given something else in line 1, column 13: Expecting value"),
        ("", "expected JSON, given something else in line 1, column 1: Expecting value"),
        ("[]", "expected a JSON object, given the array []"),
        ("null", "expected a JSON object, given null"),
        ('{"train": {"lr": NaN}}', "expected JSON, given NaN, which is no number of JSON"),
        (
            '{"layers": {"a": {}, "b": {}, "a": {}}}',
            "expected each key of an object once, given 'a' twice; rename or remove one",
        ),
        ('{"layers": ' * 100_000, "expected JSON, given objects nested too deep to be read"),
        (
            '{"train": {"epoch": ' + "1" * 5_000 + "}}",
            "expected numbers that can be read, given one that cannot: Exceeds the limit (4300 digits) for integer "
            "string conversion: value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
        ),
    ],
    ids=["torn", "empty", "array", "null", "nan", "twice", "deep", "digits"],
)
def test_a_file_without_a_json_object_is_refused(tmp_path, text, said):
    """Python's JSON parser would silently keep the last of two layers with the same name."""
    assert of_file(tmp_path, text) == f"net.json: {said}"


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """The user gave a saved model instead of its configuration."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"{\xff")
    assert refused(path) == "model.safetensors: expected JSON in UTF-8, given a wrong byte at 1"


def test_a_missing_file_is_named_with_its_folder(tmp_path):
    """In most cases the folder is wrong, so the error shows the whole path."""
    missing = tmp_path / "no.json"
    assert refused(missing) == f"{missing}: expected a JSON file, given No such file or directory"
    assert refused(tmp_path) == f"{tmp_path}: expected a JSON file, given Is a directory"


def test_only_a_path_or_a_dict_is_accepted():
    """A user may pass the list that ``json.load`` returned, or another wrong type."""
    assert refused(7) == ("configuration: expected the path of a JSON file, or a dict with its content, given int")


def test_a_key_that_is_no_text_is_refused():
    """Only a dict from Python can have such a key."""
    assert refused({1: 2}) == "configuration: expected keys that are texts, given 1"


@pytest.mark.parametrize("name", [1, ""])
def test_an_object_of_layers_has_their_names_as_keys(name):
    """The names of parameters are made of the names of layers."""
    said = f"configuration: key 'layers': expected the names of layers as keys, given {name!r}"
    assert refused({"layers": {name: {"type": "embedding"}}}) == said
