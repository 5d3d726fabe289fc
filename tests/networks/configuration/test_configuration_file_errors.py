"""A file that is no configuration is refused with a clear error."""

from networks.configuration.refusals import refused


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
