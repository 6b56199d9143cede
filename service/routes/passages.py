"""A document's own words, by tokens (as a citation gives them) or by file and line."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from service.citations import folder_of
from service.dependencies import ServicesDep, TenantDep
from service.errors import InvalidRequest
from service.ingest.passage import MAX_LINES, OutsideDocument, Passage, lines, passage
from service.routes.documents import get_document, get_handle

router = APIRouter(prefix="/v1/documents")

Place = Annotated[int | None, Query(ge=0, le=2**40)]
FromOne = Annotated[int, Query(ge=1, le=2**31)]


@router.get("/{any_id}/passage")
def retrieve_passage(
    any_id: str,
    services: ServicesDep,
    tenant: TenantDep,
    token_start: Place = None,
    token_end: Place = None,
    file: Annotated[str | None, Query(max_length=4096)] = None,
    page: Place = None,
    line: FromOne = 1,
    count: Annotated[int, Query(ge=1, le=MAX_LINES, alias="lines")] = 100,
    context: Annotated[int, Query(ge=0, le=MAX_LINES)] = 8,
) -> dict[str, Any]:
    """Either `token_start` and `token_end`, with `context` lines around, or `file` with `page`, `line` and `lines`."""
    document = get_document(services, get_handle(services, tenant, any_id))
    folder = folder_of(services, document)
    try:
        if file is not None:
            return view(lines(folder, file, page=page, line=line, count=count))
        if token_start is None or token_end is None:
            raise InvalidRequest(
                "token_start and token_end are expected, or file",
                param="token_start",
                code="missing_required_parameter",
            )
        return view(passage(folder, token_start, token_end, context_lines=context))
    except OutsideDocument as error:
        raise InvalidRequest(str(error), param="token_start" if file is None else "file") from error


def view(found: Passage) -> dict[str, Any]:
    return {
        "object": "document.passage",
        "filename": found.file,
        "page": found.page,
        "page_label": found.page_label,
        "first_line": found.first_line,
        "line": found.line,
        "before": found.before,
        "text": found.text,
        "after": found.after,
        "token_start": found.token_start,
        "token_end": found.token_end,
        "more": found.more,
    }
