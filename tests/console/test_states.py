"""What the page says when something is wrong, slow or hostile: the real application and page, an engine made up."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from loadtests.console import handle
from service.auth import Key, KeyRing, Limits
from tests.console.conftest import accessible
from tests.service.http_fakes import Server, serving

OpenPage = Callable[..., Page]
MAX_UPLOAD = 20_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, max_upload_bytes=MAX_UPLOAD) as server:
        yield server


def drop(page: Page, data: bytes, name: str = "a.txt") -> None:
    page.locator("#files").set_input_files({"name": name, "mimeType": "application/octet-stream", "buffer": data})


def ask(page: Page, text: str = "What is it?") -> None:
    page.get_by_label("Your question").fill(text)
    page.get_by_role("button", name="Ask", exact=True).click()


def test_progress_waiting_question_and_cancel(server: Server, open_page: OpenPage) -> None:
    server.worker.prefill_gate.clear()
    page = open_page(server.url)
    drop(page, b"a text that takes its time")
    expect(page.locator(".doing")).to_have_text("Reading it: 33 %, about 2.0 s left")
    expect(page.locator("#document progress")).to_have_js_property("value", 0.33)
    expect(page.locator(".stages .now")).to_contain_text("prefill")
    expect(page.locator("#live")).to_contain_text("Reading it")
    ask(page)
    expect(page.locator(".answer-status")).to_have_text("still being read: prefill 33%")
    accessible(page)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".row-button")).to_have_count(0)
    assert server.http.get("/v1/files").json()["data"] == []


def test_several_files_become_one_document(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    files = [{"name": f"{name}.txt", "mimeType": "text/plain", "buffer": name.encode() * 9} for name in ("one", "two")]
    page.locator("#files").set_input_files(files)  # type: ignore[arg-type]
    expect(page.get_by_role("heading", level=1)).to_have_text("one.txt and 1 more")
    expect(page.locator(".pill")).to_have_text("ready")
    expect(page.locator(".map .cell")).to_have_count(2)


def test_too_large_and_unreadable_files_say_what_to_do(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(page.locator("#server")).not_to_be_empty()
    drop(page, b"x" * (MAX_UPLOAD + 1), "big.bin")
    notice = page.locator(".upload .notice")
    expect(notice).to_contain_text("The file is too large for this server.")
    expect(notice).to_contain_text("split it")
    expect(notice).to_contain_text("this server takes 20 kB")
    page.get_by_role("button", name="Dismiss").click()
    drop(page, b"BAD bytes", "bad.docx")
    failed = page.locator("#document .notice")
    expect(failed).to_contain_text("The file is damaged.")
    expect(failed).to_contain_text("save it anew")
    expect(failed).to_contain_text("it is damaged")  # the server's own words
    expect(page.locator("#talk")).to_be_hidden()
    accessible(page)


UNREADABLE_DROP = """() => {
    const gone = { readEntries: (resolve, reject) => reject(new DOMException("gone", "NotFoundError")) };
    const folder = { isDirectory: true, isFile: false, createReader: () => gone };
    const event = new Event("drop", { cancelable: true });
    event.dataTransfer = { items: [{ webkitGetAsEntry: () => folder }], files: [] };
    dispatchEvent(event);
}"""


def test_what_the_browser_cannot_read_is_said(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.evaluate(UNREADABLE_DROP)
    expect(page.locator("#uploads")).to_contain_text("could not read what was dropped")
    page.get_by_role("button", name="Dismiss").click()
    expect(page.locator("#uploads li")).to_have_count(0)


def test_a_server_that_knows_a_smaller_limit_is_believed(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.route(
        "**/console/settings",
        lambda route: route.fulfill(json={**server.http.get("/console/settings").json(), "max_upload_bytes": 1 << 40}),
    )
    page.reload()
    drop(page, b"x" * (MAX_UPLOAD + 1), "big.bin")
    expect(page.locator(".upload .notice")).to_contain_text("The file is too large for this server.")


def test_an_answer_is_only_ever_text(server: Server, open_page: OpenPage) -> None:
    hostile = (
        '<img src=x onerror=alert(1)> 😀 quoted: "the clause <b>bold</b> stands here" </p><script>alert(2)</script>'
    )
    server.worker.words = [hostile[:30], hostile[30:]]
    page = open_page(server.url)
    drop(page, b"before the clause <b>bold</b> stands here after", "<i>n</i>.txt")
    expect(page.locator(".pill")).to_have_text("ready")
    ask(page, "<u>why?</u>")
    expect(page.locator(".answer-status")).to_contain_text("first token")
    assert (
        page.locator(".answer").evaluate(
            "node => [...node.childNodes].map(n => n.textContent).join('').replace('here1', 'here')"
        )
        == hostile
    )
    assert page.locator("#talk img, #talk script, #talk b, #talk u, #document i").count() == 0
    page.locator(".answer .cite").first.click()
    expect(page.locator(".reader mark")).to_have_text("the clause <b>bold</b> stands here")


def test_what_the_model_refuses_is_said_and_asked_again(server: Server, open_page: OpenPage) -> None:
    page = open_page(server.url)
    drop(page, b"a short text")
    expect(page.locator(".pill")).to_have_text("ready")
    ask(page, "word " * 4000)
    notice = page.locator(".turn .notice")
    expect(notice).to_contain_text("longer than the model can read at once")
    expect(notice).to_contain_text("maximum context length is 4096 tokens")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".turn")).to_have_count(1)
    server.worker.answer_error = {"code": "out_of_memory", "message": "the worker ran out of memory"}
    ask(page)
    expect(page.locator(".turn .notice").last).to_contain_text("ran out of memory")
    server.worker.answer_error = None
    page.get_by_role("button", name="Ask again").last.click()
    expect(page.locator(".answer").last).to_contain_text("Answer about 1 documents")


def test_keys_are_asked_for_and_limits_waited_for(tmp_path: Path, open_page: OpenPage) -> None:
    keys = KeyRing(
        [
            Key(sha256=hashlib.sha256(b"sk-right").hexdigest(), tenant="a", limits=Limits(requests_per_minute=20)),
            Key(sha256=hashlib.sha256(b"sk-other").hexdigest(), tenant="b"),
            Key(sha256=hashlib.sha256(b"sk-expired").hexdigest(), tenant="a", expires_at=1.0),
        ]
    )
    with serving(tmp_path, keys=keys) as server:
        server.client("sk-right").files.create(file=("mine.txt", b"of a"), purpose="user_data")
        page = open_page(server.url)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_contain_text("This server asks for a key.")
        accessible(page)
        dialog.get_by_label("Key").fill("sk-\u2026 right")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("This can't be a key")
        expect(page.locator("#away")).to_be_hidden()
        dialog.get_by_label("Key").fill("sk-expired")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("did not accept this key")
        expect(dialog.get_by_label("Key")).to_be_focused()
        dialog.get_by_label("Key").fill("sk-right")
        dialog.get_by_role("button", name="Use this key").click()
        expect(page.locator(".row-button")).to_have_count(1)
        page.locator(".row-button").click()
        expect(page.locator(".pill")).to_have_text("ready")
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]

        bearer = {"authorization": "Bearer sk-right"}
        while server.http.get("/v1/files", headers=bearer).status_code == 200:
            pass
        ask(page)
        expect(page.locator(".turn")).to_contain_text("too many requests for this key")
        expect(page.locator(".answer")).to_contain_text("Answer about")
        expect(page.locator(".turn .notice")).to_have_count(0)

        # Another tenant's key shows another shelf.
        page.get_by_role("button", name="API key").click()
        dialog.get_by_label("Key").fill("sk-other")
        page.keyboard.press("Enter")
        expect(page.locator("#count")).to_have_text("0")
        expect(page.locator("#document")).to_be_hidden()


def test_a_thousand_documents_are_painted_at_once(server: Server, open_page: OpenPage) -> None:
    now = time.time()
    for number in range(1000):
        server.documents.create_file(handle(number, now, None))
    page = open_page(server.url)
    expect(page.locator("#count")).to_have_text("1,000")
    paints = []
    for _ in range(3):
        page.reload()
        expect(page.locator(".row-button").first).to_contain_text("contract 0000.pdf")
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    assert min(paints) < 1000, paints
    expect(page.locator("#count")).to_have_text("1,000")
    page.get_by_label("Find a document").fill("0777")
    expect(page.locator("#count")).to_have_text("1 of 1,000")
    expect(page.locator(".row-button:visible")).to_have_count(1)
    expect(page.locator(".row-button:visible")).to_contain_text("contract 0777.pdf")
