"""The console at `/`: one page and its own assets, all of this package. It calls the API as anybody else does."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.requests import Request
from starlette.responses import Response
from starlette.status import HTTP_304_NOT_MODIFIED

from service.dependencies import ServicesDep
from service.errors import NotFound

router = APIRouter()

PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, no inline script or style, and no way to make markup of a string.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    data: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Everything in `service/console`, read once; what isn't there can't be asked for."""
    found = {}
    for file in files("service").joinpath("console").iterdir():
        if (kind := _TYPES.get(file.name.rpartition(".")[2])) is not None:
            data = file.read_bytes()
            found[file.name] = Asset(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found


def serve(name: str, if_none_match: str | None) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise NotFound(f"the console has no file {name!r}")
    headers = {**HEADERS, "etag": asset.etag}
    if if_none_match is not None and asset.etag in if_none_match:
        return Response(status_code=HTTP_304_NOT_MODIFIED, headers=headers)
    return Response(asset.data, media_type=asset.media_type, headers=headers)


IfNoneMatch = Annotated[str | None, Header()]


@router.get("/")
def console(if_none_match: IfNoneMatch = None) -> Response:
    return serve(PAGE, if_none_match)


@router.get("/console/settings")
def console_settings(request: Request, services: ServicesDep) -> dict[str, Any]:
    """What the page must know before it has a key."""
    return {
        "version": version("foreword"),
        "model": services.model.id,
        "keys": request.app.state.keys,
        "max_upload_bytes": services.settings.max_upload_bytes,
    }


@router.get("/console/{name}")
def console_asset(name: str, if_none_match: IfNoneMatch = None) -> Response:
    return serve(name, if_none_match)
