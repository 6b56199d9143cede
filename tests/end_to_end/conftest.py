"""One server with the default model for the tests that don't kill or starve it."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.server import Server, running
from tests.end_to_end.text import library_text, with_needles


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("shared") / "data") as server:
        yield server


@pytest.fixture(scope="session")
def short_document() -> tuple[str, dict[str, str]]:
    """About 5,000 tokens: one whole segment and a tail."""
    return with_needles(library_text(16_000))
