"""``kuberay.yaml`` follows the schemas of KubeRay and Kubernetes, and its processes fit into its pods."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ray" / "kuberay.yaml").read_text(encoding="utf-8"))
SPEC: dict[str, Any] = MANIFEST["spec"]
CLUSTER: dict[str, Any] = SPEC["rayClusterSpec"]
[WORKERS] = CLUSTER["workerGroupSpecs"]

# The operator is a Go module, which has its schemas.
OPERATOR = "github.com/ray-project/kuberay/ray-operator@v1.4.2"


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The schema of a RayJob; unknown keys are errors, as for ``kubectl apply``."""
    if shutil.which("go") is None:
        pytest.skip("expected Go, which fetches the schemas of KubeRay, given none")
    folder = tmp_path_factory.mktemp("kuberay")
    command = ["go", "mod", "download", "-json", OPERATOR]
    got = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert got.returncode == 0, got.stderr
    text = (Path(json.loads(got.stdout)["Dir"]) / "config/crd/bases/ray.io_rayjobs.yaml").read_text(encoding="utf-8")
    versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    [version] = [each for each in versions if MANIFEST["apiVersion"].endswith(f"/{each['name']}")]
    return strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """Return the schema without unknown keys in objects that have named ones."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    given = {key: strict(value) for key, value in schema.items()}
    if given.get("type") == "object" and isinstance(given.get("properties"), dict):
        given.setdefault("additionalProperties", False)
    if given.get("x-kubernetes-int-or-string"):
        given.pop("anyOf", None)
    return given


def test_the_manifest_follows_the_schema(schema: dict[str, Any]) -> None:
    """The operator refused the job, or ignored a key with a spelling error."""
    given = MANIFEST | {"metadata": {}}  # The schema has no fields of it.
    validator = jsonschema.Draft202012Validator(schema)  # Without a check of the schema itself, for a second each.
    validator.validate(given)
    wrong = given | {"spec": SPEC | {"entryPoint": "streamiter run"}}
    with pytest.raises(jsonschema.ValidationError, match="entryPoint"):
        validator.validate(wrong)


@pytest.mark.parametrize("pods", [CLUSTER["headGroupSpec"], WORKERS], ids=["head", "processes"])
def test_pods_follow_the_schema_of_kubernetes(pods: dict[str, Any]) -> None:
    """The operator accepted the job, and Kubernetes refused its pods."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pods["template"]["spec"]}
    kubernetes_validate.validate(pod, "1.30", strict=True)


def test_each_process_has_a_pod() -> None:
    """The flow waited for ever for a processor that no pod had."""
    words = shlex.split(SPEC["entrypoint"])
    processes = int(words[words.index("--processes") + 1])
    assert WORKERS["replicas"] * int(WORKERS["rayStartParams"]["num-cpus"]) == processes
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
