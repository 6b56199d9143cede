"""Chromium, as Debian has it, and pages that must have nothing to complain about."""

import shutil
from collections.abc import Callable, Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

# CI has two slow cores, and the model's work goes on beside the browser's.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of the module, not of the session: while Playwright's loop runs, no async test can."""
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is missing: tools/system_packages.sh installs it, as root"
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context of its own; fails behind the test where a script failed or the policy was broken."""
    complaints: list[str] = []
    contexts = []

    def listen(page: Page) -> None:
        page.on("pageerror", lambda error: complaints.append(f"script: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if "Content Security Policy" in message.text else None,
        )

    def open_page(url: str, **options: object) -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce", **options)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        listen(page)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def accessible(page: Page) -> None:
    """What axe-core's WCAG rules find, on the page as it is now."""
    results = Axe().run(
        page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    )
    found = [
        (violation["id"], [node["html"][:200] for node in violation["nodes"]][:3])
        for violation in results.response["violations"]
    ]
    assert found == []
