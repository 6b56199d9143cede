"""Where an answer, or a passage that somebody names, stands in a document."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.dependencies import Services
from service.documents.base import DocumentRecord
from service.ingest.locate import Place, cite, locate
from service.waiting import ReadyFile

log = logging.getLogger(__name__)


def citations(services: Services, text: str, files: Sequence[ReadyFile]) -> list[dict[str, Any]]:
    """Annotations of an answer: each span that stands in one of its documents, exactly as there.

    `start_index` and `end_index` count characters of the answer, tokens those of the document.
    """
    found: list[dict[str, Any]] = []
    for ready in files:
        try:
            quotes = cite(folder_of(services, ready.document), text)
        except (OSError, ValueError, KeyError) as error:
            # An answer is worth more than its footnotes.
            log.warning("document %s can't be searched for quotes: %s", ready.document.id, error)
            continue
        found += [
            {
                "type": "file_citation",
                "file_id": ready.file.id,
                **place_view(quote.place),
                "start_index": quote.start,
                "end_index": quote.end,
                "quote": quote.quote,
            }
            for quote in quotes
        ]
    return sorted(found, key=lambda annotation: annotation["start_index"])


def places(services: Services, document: DocumentRecord, text: str) -> list[dict[str, Any]]:
    """Every place of a passage, in document order. Raises OSError, ValueError."""
    return [place_view(place) for place in locate(folder_of(services, document), text)]


def place_view(place: Place) -> dict[str, Any]:
    return {
        "filename": place.file,
        "page": place.page,
        "page_label": place.page_label,
        "line": place.line,
        "token_start": place.token_start,
        "token_end": place.token_end,
    }


def folder_of(services: Services, document: DocumentRecord) -> Path:
    return services.settings.files_dir / document.folder
