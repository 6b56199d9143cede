"""A minute of a server's life: documents of each class read, asked about cold and warm, one refused, one withdrawn."""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tools.observe.client import Client, zip_of

ROOT = Path(__file__).resolve().parents[2]
CODE = ("engine/kv_store/*.py", "service/queue/*.py")
PROSE = ("README.md", "ARCHITECTURE.md", "docs/http.md")
PROSE_CHARS = 38_000
CODE_CHARS = 34_000  # about 9,500 tokens: the last of them are attended sparsely
QUESTIONS = (
    "What are the parameters of the function set_policy?",
    "What does the class Counters count?",
    "Which errors may open_reader raise?",
)


class Work:
    def __init__(self, url: str) -> None:
        self._url = url
        self._client = Client(url)

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.__exit__(*exception)

    def steps(self) -> Iterator[str]:
        """Each step done, in words."""
        client = self._client
        code = client.upload("foreword.zip", zip_of(source()))
        yield "uploaded a part of this repository"
        document = client.wait(code)
        yield f"read it: {document['num_tokens']:,} tokens, first token after {document['cold_ttft_s']:.1f} s (cold)"
        for question in QUESTIONS:
            yield self._asked(code, question)
        prose = client.upload(
            "prose.zip", zip_of({name: (ROOT / name).read_text()[:6000] for name in PROSE}), kind="bundle"
        )
        client.upload("movie.mkv", b"\x1aE\xdf\xa3 not a document" * 100)
        yield "uploaded a bundle of its documentation, and a film, which is refused"
        yield from self._together(code)
        client.wait(prose)
        yield self._asked(prose, "What does make test need?")
        withdrawn = client.upload("withdrawn.txt", (ROOT / "docs/ingest.md").read_bytes())
        client.wait(withdrawn, progress=0.01)
        client.delete(withdrawn)
        yield "began another document and withdrew it"
        short = client.upload("license.txt", (ROOT / "LICENSE").read_bytes()[:5000])
        client.wait(short)
        yield self._asked(short, "Who grants the patent licence?")
        yield self._asked(code, QUESTIONS[0])

    def more(self, minutes: float) -> Iterator[str]:
        """For so long: documents of growing and shrinking length, each asked about, and known ones again."""
        ends_at, draw, known = time.monotonic() + 60 * minutes, random.Random(0), list[str]()
        text = "\n".join(source().values())
        for number in itertools.count(1):
            if time.monotonic() >= ends_at:
                return
            if number % 5 == 1:
                long = self._client.upload(f"pages-{number}.zip", zip_of(pages(draw)), kind="bundle")
                known.append(long)
                self._client.wait(long)
                yield "read a long bundle"
            start, size = draw.randrange(len(text) // 2), draw.choice((1500, 4000, 9000, 16_000))
            known.append(self._client.upload(f"part-{number}.txt", text[start : start + size].encode()))
            self._client.wait(known[-1])
            yield f"read a document of {size:,} characters"
            for _ in range(draw.randrange(2, 5)):
                yield self._asked(draw.choice(known[-3:]), draw.choice(QUESTIONS))
            if number % 3 == 0:
                yield from self._together(draw.choice(known))

    def _together(self, file_id: str) -> Iterator[str]:
        """Several users at once, so that there is a queue."""
        threads = [threading.Thread(target=self._ask_alone, args=(file_id, question)) for question in QUESTIONS * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield f"{len(threads)} users asked at once"

    def _ask_alone(self, file_id: str, question: str) -> None:
        with Client(self._url) as client, contextlib.suppress(httpx.HTTPStatusError):
            client.ask(file_id, question, max_tokens=12)

    def _asked(self, file_id: str, question: str) -> str:
        try:
            foreword = self._client.ask(file_id, question, max_tokens=24)["foreword"]
        except httpx.HTTPStatusError as error:
            return f"asked: {error.response.status_code}, {error.response.json()['error']['message']}"
        return f"asked: first token after {foreword['ttft_s']:.2f} s ({foreword['cache_state']})"


def pages(draw: random.Random) -> dict[str, str]:
    """This repository's documentation as a bundle of PROSE_CHARS, another one each time."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))
    start = draw.randrange(max(1, len(text) - PROSE_CHARS))
    half = PROSE_CHARS // 2
    return {"first.md": text[start : start + half], "second.md": text[start + half : start + PROSE_CHARS]}


def source() -> dict[str, str]:
    """Files of this repository, up to CODE_CHARS."""
    files: dict[str, str] = {}
    left = CODE_CHARS
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            if len(text) <= left:
                files[str(path.relative_to(ROOT))] = text
                left -= len(text)
    return files
