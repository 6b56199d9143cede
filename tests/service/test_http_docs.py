"""docs/http.md names every route, every status and every code of an error."""

import re
from pathlib import Path

from fastapi.routing import APIRoute

from service import errors
from service.app import ROUTES

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_route_is_described_and_no_other() -> None:
    routes = {
        f"{method} {re.sub(':path', '', route.path)}"
        for module in ROUTES
        for route in module.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert set(re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", DOCS, re.MULTILINE)) == routes


def test_every_error_class_is_described() -> None:
    def kinds(kind: type[errors.ApiError]) -> set[type[errors.ApiError]]:
        return {kind}.union(*(kinds(child) for child in kind.__subclasses__()))

    table = dict(re.findall(r"^\| (\d{3}) \| (.*) \|$", DOCS, re.MULTILINE))
    for kind in kinds(errors.ApiError):
        assert f"`{kind.code}`" in table[str(kind.status)], kind


def test_every_code_in_the_source_is_described() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "service").rglob("*.py") if "ingest" not in path.parts
    )
    raised = set(
        re.findall(r'(?:InvalidRequest|NotFound|TooLarge|InternalError)\([^)]*?code="(\w+)"', source, re.DOTALL)
    )
    assert raised
    assert all(f"`{code}`" in DOCS for code in raised), raised


def test_status_codes_of_errors_stand_in_errors_alone() -> None:
    for path in (ROOT / "service").rglob("*.py"):
        if path.name != "errors.py":
            found = re.findall(r"status(?:_code)?\s*=\s*[45]\d\d|HTTPException\(", path.read_text(encoding="utf-8"))
            assert not found, path
