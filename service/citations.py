"""Where an answer quotes its documents."""

from collections.abc import Sequence
from typing import Any

from service.dependencies import Services
from service.documents.base import DocumentRecord
from service.waiting import ReadyFile


def cite(services: Services, text: str, files: Sequence[ReadyFile]) -> list[dict[str, Any]]:
    return []


def locate_in(services: Services, document: DocumentRecord, text: str) -> list[dict[str, Any]]:
    return []
