"""The main job in the browser: the real server, the real model, a small bundle with names nobody should run."""

import io
import zipfile
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import accessible
from tests.end_to_end.server import Server, running
from tests.end_to_end.text import library_text, question, with_needles

READ_MS = 150_000  # the model reads on one thread of a machine that may be doing other things
HOSTILE = ("<img src=x onerror=alert(1)>.py", '"><script>alert(2)<&gt;.txt', "src/{{alert(3)}}'.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("console") / "data", lease_s=2, checkpoint_s=0, threads=1) as server:
        yield server


def bundle(text: str) -> dict[str, object]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(HOSTILE[0], text)
        archive.writestr(HOSTILE[1], "<script>alert(4)</script> <b>not bold</b> & more\n" * 3)
        archive.writestr(HOSTILE[2], "x = 1\n" * 40)
    return {"name": "<b onmouseover=alert(5)>.zip", "mimeType": "application/zip", "buffer": buffer.getvalue()}


def ask(page: Page, text: str, number: int) -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_label("Your question").press("Enter")
    turn = page.get_by_role("article", name=f"Question {number}", exact=True)
    expect(turn.locator(".answer-status")).to_contain_text("prompt tokens from KV")


def test_a_bundle_is_read_asked_cited_and_deleted(server: Server, open_page: Callable[..., Page]) -> None:
    text, needles = with_needles(library_text(9_000))
    page = open_page(server.url)
    accessible(page)
    page.locator("#files").set_input_files(bundle(text))  # type: ignore[arg-type]

    expect(page.get_by_role("heading", level=1)).to_have_text("<b onmouseover=alert(5)>.zip")
    expect(page.locator(".pill")).to_have_text("ready", timeout=READ_MS)
    expect(page.locator(".fact").first).to_contain_text("Tokens")

    # Its map: every file by its own name, as text; arrow keys go from one to the next, Enter opens.
    cells = page.locator(".map .cell:not(.frame)")
    expect(cells).to_have_count(3)
    assert sorted(cells.evaluate_all("cells => cells.map(cell => cell.dataset.path)")) == sorted(HOSTILE)
    largest = page.get_by_role("button", name=f"{HOSTILE[0]}: ")
    expect(largest).to_contain_text(HOSTILE[0])
    largest.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.path") in ("src", *HOSTILE[1:])
    page.get_by_role("button", name=f"{HOSTILE[1]}: ").press("Enter")
    expect(page.locator(".reader-text")).to_contain_text("<script>alert(4)</script> <b>not bold</b> & more")
    expect(page.locator("#reader-title")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".reader")).to_be_hidden()
    page.locator(".switch").get_by_text("Table").click()
    expect(page.locator(".map-table tbody tr")).to_have_count(3)
    expect(page.locator(".map-table")).to_contain_text("dense")
    page.locator(".switch").get_by_text("Map").click()
    page.locator(".switch").get_by_text("Tokens").click()
    expect(largest).to_have_class("cell t4")

    # A question, its answer, and the passage that it cites.
    key, number = next(iter(needles.items()))
    ask(page, question(key), 1)
    expect(page.locator(".answer").first).to_contain_text(number)
    page.locator(".answer .cite").first.click()
    expect(page.locator(".reader mark")).to_be_visible()
    assert page.locator(".reader mark").inner_text() in text
    expect(page.locator(".reader-text")).to_contain_text(f"numbers for {key} is: {number}")
    expect(page.locator("#reader-title")).to_have_text(HOSTILE[0])
    ask(page, question(key), 2)
    rows = page.locator("table", has=page.get_by_text("Time to first token")).locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("cold")
    expect(rows.last).to_contain_text("warm")
    expect(page.locator(".chart-bar")).to_have_count(3)
    accessible(page)
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 26)"
    accessible(page)

    # A summary, stopped.
    page.get_by_role("button", name="Summarize").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("article", name="Question 3").locator(".answer-status")).to_have_text("stopped")

    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Unpin")).to_be_visible()
    document = server.client().get("/documents", cast_to=dict)["data"][0]  # type: ignore[call-overload]
    assert document["pin"] is True

    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#sure")).to_contain_text("<b onmouseover=alert(5)>.zip")
    accessible(page)
    page.get_by_role("button", name="Keep it").click()
    expect(page.locator(".pill")).to_have_text("ready", timeout=READ_MS)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#sure").get_by_role("button", name="Delete").click()
    expect(page.locator(".row-button")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_a_server_that_dies_is_waited_for_and_the_read_goes_on(server: Server, open_page: Callable[..., Page]) -> None:
    text, needles = with_needles(library_text(9_000, skip=9), 1, seed=8)
    page = open_page(server.url)
    page.locator("#files").set_input_files({"name": "long.py", "mimeType": "text/plain", "buffer": text.encode()})
    expect(page.locator(".doing")).to_contain_text("Reading it")
    server.kill()
    expect(page.locator("#away")).to_contain_text("can't be reached")
    expect(page.locator(".doing")).to_contain_text("The connection was lost")
    key, number = next(iter(needles.items()))
    page.get_by_label("Your question").fill(question(key))
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("article", name="Question 1")).to_contain_text("The connection to the server was lost.")
    server.start()
    expect(page.locator(".pill")).to_have_text("ready", timeout=READ_MS)
    expect(page.locator("#away")).to_be_hidden()
    expect(page.locator(".answer")).to_contain_text(number)  # asked again by itself
    expect(page.locator(".turn .notice")).to_have_count(0)
