"""Scans through a real tesseract."""

import io

import pytest
from PIL import Image, ImageDraw, ImageFont

from service.ingest import IngestOptions
from service.ingest.ocr import Ocr
from tests.ingest.conftest import Read

pytestmark = pytest.mark.skipif(Ocr.find() is None, reason="tesseract is not installed")
LINES = ("This lease agreement is made", "between the landlord and the tenant", "Rent is due monthly: 1,200 dollars")


def scan() -> Image.Image:
    image = Image.new("L", (1700, 1100), 255)
    draw = ImageDraw.Draw(image)
    for index, line in enumerate(LINES):
        draw.text((150, 200 + 90 * index), line, fill=0, font=ImageFont.load_default(44))
    return image


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def test_scanned_pages_are_read_upright_or_not(read: Read) -> None:
    pages = saved(scan(), "PDF", resolution=200, save_all=True, append_images=[scan().rotate(90, expand=True)])
    document = read(pages, name="a.pdf", kind="doc", options=IngestOptions(office="off"))
    for number in (1, 2):
        assert [line for line in LINES if line not in document.page("a.pdf", number)] == []
    assert document.codes() == {"page_ocr:1", "page_ocr:2"}


def test_a_picture_without_words_says_so(read: Read) -> None:
    blank = saved(Image.new("L", (600, 400), 255), "PNG")
    document = read({"blank.png": blank, "a.txt": "WORDS\n"}, kind="bundle", options=IngestOptions(office="off"))
    assert document.reasons() == {"blank.png": "needs_ocr"}
