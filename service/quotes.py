"""Quotes of a summary: what claims to be one is held back until it is known to stand in the document.

A quote that isn't there is left out of the text and counted. Quotes are spans in quotation marks and lines that begin
with `>`; names and terms in quotation marks (under MIN_QUOTE_WORDS words and MIN_QUOTE_CHARS characters) are none.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.citations import folder_of, place_view
from service.dependencies import Services
from service.ingest.locate import QUOTATION_MARKS, verify_quote
from service.waiting import ReadyFile

log = logging.getLogger(__name__)

Verify = Callable[[str], dict[str, Any] | None]

MIN_QUOTE_CHARS = 20
MIN_QUOTE_WORDS = 3
MAX_QUOTE_CHARS = 2000  # one that goes on for longer was never opened: a stray mark
LEFT_OUT = "[…]"
# A mark that opens a quote → what ends it. A blank line ends a paragraph, and a quote that was never closed with it.
CLOSING = {"“": "[”]", "„": "[“”]", "«": "[»]", '"': r'"(?!\w)'}
OPENING = re.compile(r'[“„«]|(?<!\w)"(?!\s)|^[ \t]*>(?:[ \t]+|\Z)', re.MULTILINE)


@dataclass
class QuoteCheck:
    """Takes an answer's text as it comes and gives back what may be shown."""

    verify: Verify  # where a quote stands, None: nowhere
    text: str = ""  # all that was given back
    quotes: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    _held: str = ""

    def take(self, text: str) -> str:
        """The next part of the answer; returns what can be shown by now."""
        self._held += text
        return self._release(ended=False)

    def close(self) -> str:
        """The answer is complete; returns the rest. A quote that it breaks off in is checked as far as it goes."""
        return self._release(ended=True)

    def _release(self, *, ended: bool) -> str:
        before = len(self.text)
        while self._held:
            last = self.text[-1:] or "\n"
            opened = OPENING.search(last + self._held, 1)
            start = opened.start() - 1 if opened else len(self._held)
            # A line's indent may be that of a quote to come.
            start = min(start, len(self._held) if ended else len(self._held.rstrip(" \t")))
            self._show(start)
            if opened is None or start != opened.start() - 1 or not self._quote(opened.group(), ended=ended):
                break
        return self.text[before:]

    def _show(self, count: int) -> None:
        self.text += self._held[:count]
        self._held = self._held[count:]

    def _quote(self, mark: str, *, ended: bool) -> bool:
        """Deal with the quote that `_held` begins with. False if more text is needed."""
        if mark.strip() == ">":
            closed = re.search(r"\n", self._held)
            paragraph = None
        else:
            closed = re.compile(CLOSING[mark]).search(self._held, len(mark))
            paragraph = re.search(r"\n[ \t]*\n", self._held)
        if paragraph is not None and (closed is None or closed.start() > paragraph.start()):
            self._show(len(mark))
            return True
        if closed is not None and closed.end() == len(self._held) and mark == '"' and not ended:
            return False  # what follows says whether this mark closes
        if closed is None and not ended and len(self._held) <= MAX_QUOTE_CHARS:
            return False
        if (closed.start() if closed else len(self._held)) > MAX_QUOTE_CHARS:
            self._show(len(mark))
            return True
        self._judge(mark, closed.start() if closed else len(self._held), closed.end() if closed else len(self._held))
        return True

    def _judge(self, mark: str, end: int, behind: int) -> None:
        inside = self._held[len(mark) : end]
        is_line = mark.strip() == ">"
        quote = inside.strip(QUOTATION_MARKS).rstrip(".,;:" + QUOTATION_MARKS)
        if not quote or (not is_line and not _is_quote(quote)):
            self._show(behind)
            return
        place = self.verify(quote)
        if place is None:
            self.dropped += 1
            self._held = self._held[behind:] if is_line else LEFT_OUT + self._held[behind:]
            self._show(0 if is_line else len(LEFT_OUT))
            return
        start = len(self.text) + len(mark) + inside.index(quote)
        self.quotes.append({"quote": quote, **place, "start_index": start, "end_index": start + len(quote)})
        self._show(behind)


def _is_quote(text: str) -> bool:
    return len(text) >= MIN_QUOTE_CHARS or len(text.split()) >= MIN_QUOTE_WORDS


def verifier(services: Services, files: Sequence[ReadyFile]) -> Verify:
    """Looks for a quote in all documents of a question, the first that has it."""

    def verify(quote: str) -> dict[str, Any] | None:
        for ready in files:
            try:
                place = verify_quote(folder_of(services, ready.document), quote)
            except (OSError, ValueError, KeyError) as error:
                log.warning("document %s can't be searched for quotes: %s", ready.document.id, error)
                continue
            if place is not None:
                return {"file_id": ready.file.id, **place_view(place)}
        return None

    return verify
