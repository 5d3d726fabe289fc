"""The OpenAPI document is valid, and says what the server does: real answers fit its schemas."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from jsonschema import Draft202012Validator
from service.http_case import Case, case
from service.service_models import trips

PAGE = Path(__file__).parents[2] / "docs" / "service-http.md"


@pytest.mark.parametrize("token", [None, "SERVICE_TOKEN"])
async def test_the_document_is_valid(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of clients refused the document."""
    from openapi_spec_validator import validate  # It takes half a second.

    monkeypatch.setenv("SERVICE_TOKEN", "s3cret")
    async with case(token_env=token, client={"headers": {"Authorization": "Bearer s3cret"}}) as service:
        document = (await service.client.get("/openapi.json")).json()
        validate(document)
        assert ("security" in document) == (token is not None)
        assert document["paths"]["/livez"]["get"]["security"] == []


async def _check(service: Case, document: Mapping[str, Any], method: str, path: str, **options: Any) -> httpx.Response:
    """Ask for a path; check that the document has this status, content type, and the schema of the answer."""
    answer = await service.client.request(method, path.replace("{name}", "late"), **options)
    operation = document["paths"][path.partition("?")[0]][method.lower()]
    content = operation["responses"][str(answer.status_code)]["content"]
    described = content[answer.headers["content-type"].partition(";")[0]]["schema"]
    value = orjson.loads(answer.content) if "json" in answer.headers["content-type"] else answer.text
    validator = Draft202012Validator({**described, "components": document["components"]})
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]
    assert not errors
    return answer


async def test_real_answers_fit_their_schemas() -> None:
    """A generated client failed at the first answer, because a field that may be absent was required."""
    async with case(versions=3, flow=True) as service:
        document = (await service.client.get("/openapi.json")).json()
        rows = {"rows": [*trips(2), {"km": "far", "sky": 3}]}
        asked: list[tuple[str, str, dict[str, Any], int]] = [
            ("POST", "/predict", {"json": trips(1)[0]}, 200),
            ("POST", "/predict", {"json": rows}, 422),
            ("POST", "/predict", {"json": rows, "params": {"partial": "true", "explain": "true"}}, 200),
            ("POST", "/predict", {"json": {"row": {"km": 3.0}, "candidates": trips(3), "top": 2}}, 200),
            ("POST", "/predict", {"content": b"{"}, 400),
            ("POST", "/predict", {"content": b" " * 2_000_000}, 413),
            ("POST", "/predict", {"content": b"{}", "headers": {"Content-Encoding": "gzip"}}, 415),
            ("POST", "/models/{name}/predict", {"json": trips(1)[0]}, 200),
            ("GET", "/models/{name}/versions", {}, 200),
            ("GET", "/models/{name}/compare", {"params": {"old": "2.1"}}, 200),
            ("GET", "/models/{name}/compare", {"params": {"old": "9.9"}}, 404),
            ("GET", "/flow", {}, 200),
            ("GET", "/flow", {"headers": {"Accept": "image/svg+xml"}}, 200),
            ("GET", "/livez", {}, 200),
            ("GET", "/readyz", {}, 503),
            ("GET", "/metrics", {}, 200),
            ("GET", "/metrics", {"headers": {"Accept": "application/openmetrics-text"}}, 200),
            ("GET", "/openapi.json", {}, 200),
            *(("GET", f"/api/{name}", {}, 200) for name in ("state", "history", "details", "drawing")),
        ]
        for method, path, options, status in asked:
            answer = await _check(service, document, method, path, **options)
            assert answer.status_code == status, (method, path, answer.text)
        described = {
            status
            for each in document["paths"].values()
            for method in ("get", "post")
            if method in each
            for status in each[method]["responses"]
        }
        # The table of errors in the documents.
        told = re.findall(r"^\| (\d{3}(?:, \d{3})*) \| `", PAGE.read_text("utf-8"), re.MULTILINE)
        assert {status for each in told for status in each.split(", ")} == described - {"200"}
        # The answer with events has no end.
        assert {path for _, path, _, _ in asked} == set(document["paths"]) - {"/api/events"}


async def test_requests_of_the_document_are_those_that_are_answered() -> None:
    """A client checked its rows with the schema, and the service refused them."""
    async with case() as service:
        document = (await service.client.get("/openapi.json")).json()
        body = document["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**body, "components": document["components"]})
        for given in ({"rows": trips(2)}, trips(1)[0], {}, {"rows": []}):
            assert validator.is_valid(given)
            assert (await service.client.post("/predict", json=given)).status_code == 200
        for given in ([], {"rows": 3}, {"rows": [3]}, 3):
            assert not validator.is_valid(given)
            assert (await service.client.post("/predict", json=given)).status_code == 422
