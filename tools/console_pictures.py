"""Take the pictures of docs/console.md: a real server reads a part of this repository, a question is asked in Chromium.

Needs Debian's chromium (or another one: --chromium PATH); Inter, where installed, is the typeface. Writes
docs/images/console-light.png and console-dark.png.
"""

import argparse
import io
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from demo import ROOT, free_port, wait_until_ready
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDERS = ("engine/*.py", "engine/kv_store/*.py", "engine/sparse/*.py", "service/queue/*.py", "service/stages/*.py")
MAX_CHARS = 70_000  # about 20,000 tokens
QUESTIONS = (
    "What are the parameters of the function resolve_model?",
    "What are the parameters of the function set_policy?",
)
SIZE = {"width": 1440, "height": 960}
MAX_BYTES = 300_000
READ_MS = 600_000


def repository_part() -> bytes:
    buffer, size = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in FOLDERS:
            for path in sorted(ROOT.glob(pattern)):
                text = path.read_text()
                if size + len(text) <= MAX_CHARS:
                    archive.writestr(str(path.relative_to(ROOT)), text)
                    size += len(text)
    return buffer.getvalue()


def take(page: Page, folder: Path, theme: str) -> None:
    if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") != (theme == "dark"):
        raise AssertionError(f"the page isn't {theme}")
    picture = Image.open(io.BytesIO(page.screenshot()))
    # A page of few colours: a palette keeps it sharp and a third of the size.
    path = folder / f"console-{theme}.png"
    picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:
        raise AssertionError(f"{path} has {path.stat().st_size} bytes, {MAX_BYTES} are allowed")
    print(f"{path}: {path.stat().st_size:,} bytes")


def read_and_ask(page: Page, url: str) -> None:
    page.goto(url)
    page.locator("#files").set_input_files(
        {"name": "foreword.zip", "mimeType": "application/zip", "buffer": repository_part()}
    )
    expect(page.locator(".pill")).to_have_text("ready", timeout=READ_MS)
    for number, question in enumerate(QUESTIONS, 1):
        page.get_by_label("Your question").fill(question)
        page.get_by_role("button", name="Ask", exact=True).click()
        turn = page.get_by_role("article", name=f"Question {number}", exact=True)
        expect(turn.locator(".answer-status")).to_contain_text("from KV", timeout=READ_MS)
    page.locator(".sources .cite").last.click()
    expect(page.locator(".reader mark").first).to_be_visible()
    page.mouse.move(5, 950)


def pictures(browser: Browser, url: str, folder: Path) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
    read_and_ask(page, url)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.locator("#main").evaluate("main => main.scrollTop = 0")
        take(page, folder, theme)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--chromium", default="/usr/bin/chromium")
    arguments.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="foreword-pictures-") as folder, sync_playwright() as playwright:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "foreword", "serve", "--port", str(port)],
                env={**os.environ, "FOREWORD_DATA_DIR": str(Path(folder) / "data")},
                stdout=output,
                stderr=output,
            )
        try:
            wait_until_ready(url, server, log)
            browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
            pictures(browser, url, options.out)
            browser.close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
