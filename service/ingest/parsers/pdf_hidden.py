"""What a PDF page shows otherwise than it says: scans, text under boxes, text without ink."""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pypdfium2.raw as pdfium
from numpy.typing import NDArray

from service.ingest.parsers.pdf_chars import PageChars

Box = tuple[float, float, float, float]  # left, bottom, right, top
MAX_OBJECTS = 20_000
MIN_BOX_POINTS = 4.0
INVISIBLE_MODE = 3  # text render mode 3: neither filled nor stroked
MEANINGLESS = re.compile("[\ufffd\ue000-\uf8ff\x01\x03-\x08\x0e-\x1f\x80-\x9f]")
NEAR = 40  # of 255: colours that the eye takes for one


@dataclass
class _Filled:
    box: Box
    colour: tuple[int, int, int]
    order: int


@dataclass
class PageObjects:
    """What lies on the page besides readable text."""

    image_share: float = 0.0  # of the page that images cover
    has_drawings: bool = False
    boxes: list[_Filled] = field(default_factory=list)
    invisible_text: bool = False
    white_text: list[Box] = field(default_factory=list)
    order_of: dict[int, int] = field(default_factory=dict)  # address of a text object → drawing order


def survey_objects(page: Any, width: float, height: float) -> PageObjects:
    found = PageObjects()
    count = min(pdfium.FPDFPage_CountObjects(page), MAX_OBJECTS)
    area = max(width * height, 1.0)
    for order in range(count):
        item = pdfium.FPDFPage_GetObject(page, order)
        _look(item, order, found, area, depth=0)
    return found


def _look(item: Any, order: int, found: PageObjects, area: float, depth: int) -> None:
    kind = pdfium.FPDFPageObj_GetType(item)
    if kind == pdfium.FPDF_PAGEOBJ_TEXT:
        found.order_of[ctypes.cast(item, ctypes.c_void_p).value or 0] = order
        if pdfium.FPDFTextObj_GetTextRenderMode(item) == INVISIBLE_MODE:
            found.invisible_text = True
        else:
            colour = _colour(item)
            if colour is not None and min(colour) > 255 - NEAR // 2:
                box = _bounds(item)
                if box is not None:
                    found.white_text.append(box)
    elif kind == pdfium.FPDF_PAGEOBJ_IMAGE:
        box = _bounds(item)
        if box is not None:
            found.image_share += max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) / area
    elif kind == pdfium.FPDF_PAGEOBJ_PATH:
        found.has_drawings = True
        _look_at_path(item, order, found, area)
    elif kind == pdfium.FPDF_PAGEOBJ_SHADING:
        found.has_drawings = True
    elif kind == pdfium.FPDF_PAGEOBJ_FORM and depth < 4:
        for index in range(min(pdfium.FPDFFormObj_CountObjects(item), MAX_OBJECTS)):
            inner = pdfium.FPDFFormObj_GetObject(item, index)
            if pdfium.FPDFPageObj_GetType(inner) == pdfium.FPDF_PAGEOBJ_IMAGE:
                # Its box is in the form's own space; the form's box bounds it.
                box = _bounds(item)
                if box is not None:
                    found.image_share += max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) / area
                break
            if pdfium.FPDFPageObj_GetType(inner) == pdfium.FPDF_PAGEOBJ_PATH:
                found.has_drawings = True


def _look_at_path(item: Any, order: int, found: PageObjects, area: float) -> None:
    fill, stroke = ctypes.c_int(), ctypes.c_int()
    if not pdfium.FPDFPath_GetDrawMode(item, fill, stroke) or fill.value == 0:
        return
    box = _bounds(item)
    if box is None or box[2] - box[0] < MIN_BOX_POINTS or box[3] - box[1] < MIN_BOX_POINTS:
        return
    if (box[2] - box[0]) * (box[3] - box[1]) > 0.7 * area:
        return  # the page's background
    colour = _colour(item)
    if colour is not None:
        found.boxes.append(_Filled(box, colour, order))


def _bounds(item: Any) -> Box | None:
    left, bottom, right, top = ctypes.c_float(), ctypes.c_float(), ctypes.c_float(), ctypes.c_float()
    if not pdfium.FPDFPageObj_GetBounds(item, left, bottom, right, top):
        return None
    return left.value, bottom.value, right.value, top.value


def _colour(item: Any) -> tuple[int, int, int] | None:
    """Fill colour; None where it is transparent."""
    red, green, blue, alpha = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if not pdfium.FPDFPageObj_GetFillColor(item, red, green, blue, alpha) or alpha.value < 200:
        return None
    return red.value, green.value, blue.value


def covered_by_boxes(text_page: Any, chars: PageChars, found: PageObjects) -> bool:
    """Whether words stand under an opaque box: drawn over them, or in their own colour (a failed redaction)."""
    if not found.boxes or not len(chars.solid):
        return False
    x, y = _centres(chars)
    for filled in found.boxes:
        left, bottom, right, top = filled.box
        inside = chars.solid[(x > left) & (x < right) & (y > bottom) & (y < top)]
        if len(inside) < 3:
            continue
        sample = inside[:: max(1, len(inside) // 8)]
        hidden = sum(_is_hidden(text_page, int(i), filled, found) for i in sample)
        if hidden * 2 > len(sample):
            return True
    return False


def _is_hidden(text_page: Any, index: int, filled: _Filled, found: PageObjects) -> bool:
    item = pdfium.FPDFText_GetTextObject(text_page, index)
    drawn = found.order_of.get(ctypes.cast(item, ctypes.c_void_p).value or 0) if item else None
    if drawn is not None and drawn < filled.order:
        return True
    colour = _text_colour(text_page, index)
    return colour is not None and all(abs(a - b) < NEAR for a, b in zip(colour, filled.colour, strict=True))


def _text_colour(text_page: Any, index: int) -> tuple[int, int, int] | None:
    red, green, blue, alpha = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if not pdfium.FPDFText_GetFillColor(text_page, index, red, green, blue, alpha):
        return None
    return red.value, green.value, blue.value


def has_white_on_white(found: PageObjects) -> bool:
    """White text that lies on no box and no image: nobody sees it on paper."""
    if found.image_share > 0.2:
        return False
    for left, bottom, right, top in found.white_text:
        x, y = (left + right) / 2, (bottom + top) / 2
        on_box = any(
            b.box[0] <= x <= b.box[2] and b.box[1] <= y <= b.box[3] and min(b.colour) < 255 - NEAR for b in found.boxes
        )
        if right - left > 8 and not on_box:
            return True
    return False


def outside_page(chars: PageChars, page_box: Box) -> bool:
    """Whether words lie wholly outside of what is shown."""
    if not len(chars.solid):
        return False
    x, y = _centres(chars)
    left, bottom, right, top = page_box
    return int(((x < left) | (x > right) | (y < bottom) | (y > top)).sum()) > 12


def tiny_text(chars: PageChars) -> bool:
    """Words in type of under two points."""
    heights = np.abs(chars.boxes[chars.solid, 1] - chars.boxes[chars.solid, 3])
    widths = np.abs(chars.boxes[chars.solid, 2] - chars.boxes[chars.solid, 0])
    return int(((heights < 2.0) & (widths < 2.0) & (heights > 0)).sum()) > 12


def _centres(chars: PageChars) -> tuple[NDArray[Any], NDArray[Any]]:
    boxes = chars.boxes[chars.solid]
    half = np.float32(0.5)
    return (boxes[:, 0] + boxes[:, 2]) * half, (boxes[:, 1] + boxes[:, 3]) * half


def looks_garbled(text: str, errors: Sequence[bool]) -> bool:
    """Letters without meaning: a font whose codes map to nothing. `errors`: pdfium's verdict on a sample."""
    if errors and sum(errors) > 0.3 * len(errors):
        return True
    if len(text) < 20:
        return False
    if len(MEANINGLESS.findall(text)) > 0.15 * len(text):
        return True
    words = [w for w in text.lower().split() if len(w) >= 4 and w.isascii() and w.isalpha()]
    vowelless = sum(1 for w in words if not any(c in "aeiouy" for c in w))
    return len(words) >= 20 and vowelless > 0.4 * len(words)
