"""Characters of a PDF page with their boxes, fetched from pdfium in one tight loop, and grouped into runs."""

import ctypes
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pypdfium2.raw as pdfium
from numpy.typing import NDArray

# The raw binding converts each argument; these calls are made thousands of times a page, with plain addresses.
_box_at = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
    ctypes.cast(pdfium.FPDFText_GetLooseCharBox, ctypes.c_void_p).value or 0
)
_angle_at = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_void_p, ctypes.c_int)(
    ctypes.cast(pdfium.FPDFText_GetCharAngle, ctypes.c_void_p).value or 0
)
# pdfium's own marks for a hyphen at a line's end.
HYPHEN_MARKS = "\x02\ufffe"
LIGATURES = {
    "\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl", "\ufb05": "st", "\ufb06": "st",
}  # fmt: skip
TRANSLATION = str.maketrans({**LIGATURES, "\xad": None, "\u00a0": " ", "\r": " ", "\n": " ", "\t": " ", "\0": None})
SPACES = re.compile(r" {2,}")
WHITE_SPACE = np.array([c for c in range(0x3001) if chr(c).isspace()], dtype=np.uint32)
# In heights of the line: a wider gap ends a run (a cell, a column); a narrower one is a space.
RUN_GAP = 0.9
MAX_CHARS = 200_000  # of one page; drawings made of letters have more


@dataclass
class Run:
    """Neighbouring characters on one line. The box is in reading orientation: x to the right, y upwards."""

    x0: float
    y0: float
    x1: float
    y1: float
    text: str
    order: int  # in the content stream

    @property
    def height(self) -> float:
        return self.y1 - self.y0

    @property
    def middle(self) -> float:
        return (self.y0 + self.y1) / 2


@dataclass
class PageChars:
    text: str
    boxes: NDArray[np.float32]  # [chars, 4] left, top, right, bottom as pdfium has it
    solid: NDArray[np.intp]  # indexes of characters that are no white space


def read_chars(text_page: Any) -> PageChars:
    count = min(pdfium.FPDFText_CountChars(text_page), MAX_CHARS)
    if count <= 0:
        return PageChars("", np.zeros((0, 4), np.float32), np.zeros(0, np.intp))
    buffer = (ctypes.c_uint16 * (2 * count + 2))()
    written = pdfium.FPDFText_GetText(text_page, 0, count, buffer)
    text = bytes(buffer)[: 2 * max(written - 1, 0)].decode("utf-16-le", "replace")
    if len(text) != count:  # characters beyond the BMP or without a code: go one by one to stay aligned
        codes = [pdfium.FPDFText_GetUnicode(text_page, i) for i in range(count)]
        text = _from_codes(codes)
    boxes = (ctypes.c_float * (4 * count))()
    address = ctypes.addressof(boxes)
    handle = ctypes.cast(text_page, ctypes.c_void_p).value
    for index in range(count):
        _box_at(handle, index, address + 16 * index)
    array = np.frombuffer(boxes, dtype=np.float32).reshape(count, 4)
    codes_seen = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    solid = np.flatnonzero(~np.isin(codes_seen, WHITE_SPACE))
    return PageChars(text, array, solid)


def _from_codes(codes: list[int]) -> str:
    """One character an index; the two halves of a surrogate pair become the character and a zero-width filler."""
    out: list[str] = []
    for code in codes:
        if 0xDC00 <= code <= 0xDFFF and out and 0xD800 <= ord(out[-1]) <= 0xDBFF:
            out[-1] = chr(0x10000 + ((ord(out[-1]) - 0xD800) << 10) + (code - 0xDC00))
            out.append(" ")
        else:
            out.append(chr(code) if 0 < code < 0x110000 else "\ufffd")
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in out)


def runs_by_direction(text_page: Any, chars: PageChars) -> list[list[Run]]:
    """Runs of the page's text, one list a writing direction, the commonest first."""
    if not len(chars.solid):
        return []
    if not _looks_turned(chars.boxes[chars.solid]):
        return [_runs(chars, chars.solid, chars.boxes)]
    handle = ctypes.cast(text_page, ctypes.c_void_p).value
    angles = np.array([_angle_at(handle, int(i)) for i in chars.solid])
    quarter = np.round(angles / (math.pi / 2)).astype(int) % 4
    groups = []
    for turn in sorted(set(quarter.tolist()), key=lambda t: -int((quarter == t).sum())):
        groups.append(_runs(chars, chars.solid[quarter == turn], _turn(chars.boxes, turn)))
    return groups


def _looks_turned(boxes: NDArray[np.float32]) -> bool:
    """Whether many characters follow one another upwards, downwards or to the left."""
    x, y = (boxes[:, 0] + boxes[:, 2]) / 2, (boxes[:, 1] + boxes[:, 3]) / 2
    size = np.maximum(np.abs(boxes[:, 1] - boxes[:, 3]), np.abs(boxes[:, 2] - boxes[:, 0]))[1:]
    dx, dy = np.diff(x), np.diff(y)
    backwards = (np.abs(dy) < 0.3 * size) & (dx < -0.05 * size) & (dx > -2 * size)
    vertical = (np.abs(dy) > np.abs(dx)) & (np.abs(dy) < 1.5 * size)
    turned = int((backwards | vertical).sum())
    return turned >= 6 and turned > 0.1 * len(boxes)


def _turn(boxes: NDArray[np.float32], quarter_turns: int) -> NDArray[np.float32]:
    """Boxes in the frame of text that is turned by so many quarters, clockwise positive in pdfium's y-up space."""
    left, top, right, bottom = boxes.T
    low_x, high_x = np.minimum(left, right), np.maximum(left, right)
    low_y, high_y = np.minimum(top, bottom), np.maximum(top, bottom)
    if quarter_turns == 1:  # reading downwards
        turned = (-high_y, high_x, -low_y, low_x)
    elif quarter_turns == 2:
        turned = (-high_x, -low_y, -low_x, -high_y)
    elif quarter_turns == 3:  # reading upwards
        turned = (low_y, -low_x, high_y, -high_x)
    else:
        turned = (low_x, high_y, high_x, low_y)
    return np.stack(turned, axis=1)


def _runs(chars: PageChars, solid: NDArray[np.intp], boxes: NDArray[np.float32]) -> list[Run]:
    if not len(solid):
        return []
    picked = boxes[solid]
    left, right = np.minimum(picked[:, 0], picked[:, 2]), np.maximum(picked[:, 0], picked[:, 2])
    top, bottom = np.maximum(picked[:, 1], picked[:, 3]), np.minimum(picked[:, 1], picked[:, 3])
    height = np.maximum(top - bottom, 1.0)
    middle = (top + bottom) / 2
    least = np.minimum(height[1:], height[:-1])
    gap = left[1:] - right[:-1]
    breaks = (
        (np.abs(middle[1:] - middle[:-1]) > 0.5 * np.maximum(height[1:], height[:-1]))
        | (gap > RUN_GAP * np.maximum(least, 4.0))
        | (left[1:] < left[:-1] - 0.5 * least)
    )
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    ends = np.concatenate((starts[1:], [len(solid)]))
    x0 = np.minimum.reduceat(left, starts)
    x1 = np.maximum.reduceat(right, starts)
    y0 = np.minimum.reduceat(bottom, starts)
    y1 = np.maximum.reduceat(top, starts)
    firsts, lasts = solid[starts], solid[ends - 1]
    contiguous = len(solid) == len(chars.solid)
    out = []
    for index in range(len(starts)):
        first, last = int(firsts[index]), int(lasts[index])
        if contiguous:
            raw = chars.text[first : last + 1]
        else:
            members = solid[starts[index] : ends[index]].tolist()
            raw = _with_spaces(chars.text, members)
        text = SPACES.sub(" ", raw.translate(TRANSLATION))
        if text:
            out.append(Run(float(x0[index]), float(y0[index]), float(x1[index]), float(y1[index]), text, first))
    return out


def _with_spaces(text: str, members: list[int]) -> str:
    """Members of one direction with the white space that stood between neighbours."""
    out = [text[members[0]]]
    for before, at in pairwise(members):
        if at - before > 1 and any(c.isspace() for c in text[before + 1 : at]):
            out.append(" ")
        out.append(text[at])
    return "".join(out)
