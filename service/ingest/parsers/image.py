"""Pictures and faxes: pages for OCR, or a word that they need it."""

from collections.abc import Iterator

from PIL import Image, ImageSequence, UnidentifiedImageError

from service.ingest.parsers.protocol import Message, ParseError, Request, warning

MAX_PIXELS = 100_000_000
MAX_FRAMES = 2000
MIN_SIDE = 24  # smaller ones are icons


def parse(request: Request) -> Iterator[Message]:
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    try:
        with Image.open(request.file) as image:
            paged = getattr(image, "n_frames", 1) > 1 and image.format == "TIFF"
            for number, frame in enumerate(ImageSequence.Iterator(image), 1):
                if number > (MAX_FRAMES if paged else 1):
                    break
                if paged:
                    yield {"page": number, "label": None, "mark": "page"}
                if min(frame.size) < MIN_SIDE:
                    continue
                if not request.ocr:
                    yield warning(f"page_needs_ocr:{number}")
                    continue
                target = request.scratch / f"ocr-{request.file.name}-{number}.png"
                frame.convert("L").save(target)
                yield {"ocr": {"page": number, "image": str(target)}}
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ParseError("document_corrupt", f"the picture can't be read: {error}") from error
