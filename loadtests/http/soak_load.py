"""Users of a soak: each draws its next step by weight, and what must hold of every answer is checked at once."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtests.http.client import Client, Reply
from loadtests.http.texts import Text, Texts

# Of a document that another user deleted meanwhile.
GONE = frozenset({"file_not_found", "document_deleted"})


@dataclass
class Known:
    """A document that was read, and the first answer to each of its questions."""

    file_id: str
    text: Text
    answers: dict[str, str] = field(default_factory=dict)


class Shelf:
    """What all users know; `tally` counts steps by outcome."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: list[Known] = []
        self.tally: Counter[str] = Counter()
        self.requests = 0
        self.changed: list[str] = []
        self.found = self.asked = 0

    def count(self, step: str, code: str) -> None:
        with self._lock:
            self.requests += 1
            self.tally[f"{step} {code}"] += 1

    def add(self, known: Known) -> Known | None:
        """Returns the one that must go for it, if there are too many."""
        with self._lock:
            self._known.append(known)
            return self._known.pop(0) if len(self._known) > self._most else None

    def any(self, chance: random.Random) -> Known | None:
        with self._lock:
            return chance.choice(self._known) if self._known else None

    def take(self, chance: random.Random) -> Known | None:
        """One that leaves the shelf."""
        with self._lock:
            return self._known.pop(chance.randrange(len(self._known))) if self._known else None

    def take_all(self) -> list[Known]:
        with self._lock:
            known, self._known = self._known, []
            return known

    def check(self, known: Known, question: str, reply: Reply) -> None:
        """The same question about the same document is answered the same: cold, warm, evicted, or by another worker."""
        with self._lock:
            first = known.answers.setdefault(question, reply.text)
            self.asked += 1
            self.found += known.text.numbers[question] in reply.text
            if first != reply.text:
                self.changed.append(f"{known.file_id} {reply.cache_state}: {first!r}, then {reply.text!r}")


class User:
    """One thread of steps until `stop` is set; between them it thinks for `think_s` on average."""

    def __init__(
        self,
        client: Client,
        shelf: Shelf,
        texts: Texts,
        chance: random.Random,
        *,
        sizes: tuple[int, int],
        think_s: float,
    ) -> None:
        self._client, self._shelf, self._texts, self._chance = client, shelf, texts, chance
        self._sizes, self._think_s = sizes, think_s
        self._steps: dict[Callable[[], None], int] = {
            self._ask_known: 12,
            self._read_new: 4,
            self._leave_answer: 3,
            self._leave_prefill: 2,
            self._withdraw: 2,
            self._delete: 1,
            self._refused: 1,
            self._look: 3,
        }

    def run(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self._chance.choices(list(self._steps), weights=list(self._steps.values()))[0]()
                stop.wait(self._chance.expovariate(1 / self._think_s))
        except BaseException as error:  # or the soak would pass with nobody left
            self._shelf.count("user", type(error).__name__)
            raise

    def _ask_known(self) -> None:
        if (known := self._shelf.any(self._chance)) is not None:
            self._ask(known, "ask")

    def _read_new(self) -> None:
        known = self._upload()
        if known is None:
            return
        self._ask(known, "ask new")
        if (old := self._shelf.add(known)) is not None:
            self._shelf.count("delete", self._client.delete(old.file_id))

    def _ask(self, known: Known, step: str) -> None:
        question = self._chance.choice(list(known.text.numbers))
        reply = self._client.ask(known.file_id, question, max_tokens=16)
        self._shelf.count(step, reply.code)
        if reply.code == "ok":
            self._shelf.check(known, question, reply)

    def _leave_answer(self) -> None:
        if (known := self._shelf.any(self._chance)) is not None:
            question = self._chance.choice(list(known.text.numbers))
            reply = self._client.ask(known.file_id, question, max_tokens=200, leave="stream")
            self._shelf.count("leave answer", reply.code)

    def _leave_prefill(self) -> None:
        """The document stays: its prefill is asked for by the upload, and the next question finds it."""
        known = self._upload()
        if known is None:
            return
        reply = self._client.ask(known.file_id, next(iter(known.text.numbers)), leave="prefill")
        self._shelf.count("leave prefill", reply.code)
        if (old := self._shelf.add(known)) is not None:
            self._shelf.count("delete", self._client.delete(old.file_id))

    def _withdraw(self) -> None:
        """Deleted while it is read, or just before or after."""
        known = self._upload()
        if known is not None:
            time.sleep(self._chance.random())
            self._shelf.count("withdraw", self._client.delete(known.file_id))

    def _delete(self) -> None:
        if (known := self._shelf.take(self._chance)) is not None:
            self._shelf.count("delete", self._client.delete(known.file_id))

    def _refused(self) -> None:
        file_id, code = self._client.upload_bytes("film.mkv", b"\x1aE\xdf\xa3 not a document" * 100)
        if file_id:
            code = self._client.wait(file_id)[1]
            self._shelf.count("delete", self._client.delete(file_id))
        self._shelf.count("refused", code)

    def _look(self) -> None:
        for path in ("/v1/documents", "/metrics", "/v1/files"):
            self._shelf.count("look", self._client.get(path)[1])

    def _upload(self) -> Known | None:
        text = self._texts.draw(self._chance.randrange(*self._sizes))
        file_id, code = self._client.upload(text)
        self._shelf.count("upload", code)
        return Known(file_id, text) if file_id else None
