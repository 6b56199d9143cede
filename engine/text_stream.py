"""From token ids to text as it can be shown: whole UTF-8 characters, nothing of a stop string. Torch-free."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "�"


class TextStream:
    """One answer's text. `decode` turns token ids into text, leaving out control tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        # Tokens [context, shown) are text already; they are decoded again with what follows, because a token's text
        # may depend on its neighbour.
        self._context = self._shown = 0
        self._held = ""  # could be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more token. Sets `stopped` when a stop string is complete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""  # in the middle of a character, or a control token
        self._context, self._shown = self._shown, len(self._ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """What was held back: the end came before a character or a stop string was complete."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._context : self._shown])
        after = self._decode(self._ids[self._context :])
        self._context = self._shown = len(self._ids)
        text = self._release(after[len(before) :])
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _release(self, text: str) -> str:
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)], "", True
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
