"""Short questions beside a long prefill: `make mixed`.

A `foreword serve` with the default model. Questions of 2,000 tokens without a document come at fixed times, whether or
not the last was answered; their TTFT counts from when they were due. First on an idle worker, then a long document is
read by itself, then another of the same length while questions come: `short_p99_ratio_beside_long` is the p99 beside
over the p99 idle, `interleave_cost_share` what the long prefill lost beyond the questions' own computing (as they
computed on the idle worker), as a share of its time alone.

A question's own computing decides the rate: one each 500 ms, or as many as keep the idle worker busy half of the time.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.http.client import Client
from loadtests.http.samples import percentile
from loadtests.http.scrape import Scrape, scrape
from loadtests.http.server import LocalServer
from loadtests.http.texts import CHARS_PER_TOKEN, Text, Texts, corpus
from loadtests.quiet import PATIENCE_S, wait_until_quiet
from loadtests.results import write_entry

COMMAND = "make mixed"
QUESTION_TOKENS = 2000
ANSWER_TOKENS = 4
EVERY_S = 0.5
UTILISATION = 0.5  # of the idle worker, at most
DEVICE_S = "foreword_device_seconds_total"


@dataclass(frozen=True)
class Asked:
    """One question: seconds from when it was due to its first text, and to its end."""

    ttft_s: float
    seconds: float
    prompt_tokens: int


class Questions:
    """Each another piece of text, so that none finds anything stored."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._number = 0

    def body(self) -> dict[str, Any]:
        self._number += 1
        size = int(QUESTION_TOKENS * CHARS_PER_TOKEN)
        start = self._number * size % (len(corpus()) - size)
        text = f"{corpus()[start : start + size]}\n\nWhat is the first function above for?"
        return {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def ask(self, client: httpx.AsyncClient, due: float) -> Asked:
        """Raises httpx.HTTPError, RuntimeError where no text comes."""
        first, tokens = None, 0
        async with client.stream("POST", "/v1/chat/completions", json=self.body()) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                if first is None and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                    first = time.monotonic()
                tokens = (chunk.get("usage") or {}).get("prompt_tokens", tokens)
        if first is None:
            raise RuntimeError("an answer without text")
        return Asked(first - due, time.monotonic() - due, tokens)

    async def one_by_one(self, count: int) -> list[Asked]:
        async with self._client() as client:
            return [await self.ask(client, time.monotonic()) for _ in range(count)]

    async def open_loop(self, every_s: float, goes_on: Callable[[float], bool]) -> list[Asked]:
        """One question each `every_s` while `goes_on(seconds)`; returns when the last is answered."""
        began, tasks = time.monotonic(), list[asyncio.Task[Asked]]()
        async with self._client() as client:
            while goes_on(len(tasks) * every_s):
                due = began + len(tasks) * every_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(asyncio.create_task(self.ask(client, due)))
            return await asyncio.gather(*tasks)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self._url, timeout=600, limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        )


class LongPrefill:
    """One long document: uploaded, and waited for in small looks."""

    def __init__(self, client: Client, text: Text) -> None:
        self._client = client
        self._id, code = client.upload(text)
        if code != "ok":
            raise RuntimeError(f"the upload was refused: {code}")

    def document(self) -> dict[str, Any]:
        """Raises RuntimeError where it failed."""
        found, code = self._client.get(f"/v1/documents/{self._id}")
        if code != "ok" or found["state"] == "error":
            raise RuntimeError(f"the long document failed: {code} {found.get('error')}")
        return found

    def wait(self, *states: str) -> dict[str, Any]:
        """Until it is in one of these states, and a prefill has begun. Raises RuntimeError where it went past them."""
        while (found := self.document())["state"] not in states or (states == ("prefill",) and not found["progress"]):
            if found["state"] == "ready":
                raise RuntimeError("the long document was read before it was seen to be: take a longer one")
            time.sleep(0.25)
        return found


def computed(before: Scrape, after: Scrape) -> float:
    """Seconds that the engine computed for answers."""
    return after.since(before).total(DEVICE_S, stage="answer")


def measure(server: LocalServer, long_tokens: int, idle_s: float) -> dict[str, Any]:
    questions, texts, client = Questions(server.url), Texts(11), Client(server.url)
    asyncio.run(questions.one_by_one(3))
    time.sleep(1.5)  # what is counted is told once a second
    before = scrape(server.url)
    singly = asyncio.run(questions.one_by_one(8))
    time.sleep(1.5)
    own_s = computed(before, scrape(server.url)) / len(singly)
    every_s = max(EVERY_S, own_s / UTILISATION)
    print(f"a question computes for {own_s:.3f} s: one each {every_s:.2f} s", flush=True)

    before = scrape(server.url)
    idle = asyncio.run(questions.open_loop(every_s, lambda seconds: seconds < idle_s))
    time.sleep(1.5)
    idle_own_s = computed(before, scrape(server.url)) / len(idle)
    print(f"idle: {len(idle)} questions, {shown(idle)}", flush=True)

    alone = LongPrefill(client, texts.draw(long_tokens)).wait("ready")
    alone_s = alone["stage_seconds"]["prefill"]
    print(f"alone: {alone['num_tokens']} tokens in {alone_s:.1f} s", flush=True)

    long = LongPrefill(client, texts.draw(long_tokens))
    long.wait("prefill")
    before = scrape(server.url)
    beside = asyncio.run(questions.open_loop(every_s, lambda seconds: long.document()["state"] != "ready"))
    found = long.wait("ready")
    time.sleep(1.5)
    beside_s = found["stage_seconds"]["prefill"]
    print(f"beside: {len(beside)} questions, {shown(beside)}; the long one took {beside_s:.1f} s", flush=True)
    client.close()
    return {
        "question_computes_s": {
            "one by one": own_s,
            "idle": idle_own_s,
            "beside": computed(before, scrape(server.url)) / len(beside),
        },
        "every_s": every_s,
        "tokens": {"question": statistics.median(one.prompt_tokens for one in idle), "long": found["num_tokens"]},
        "ttft_s": {"idle": [one.ttft_s for one in idle], "beside": [one.ttft_s for one in beside]},
        "long_s": {"alone": alone_s, "beside": beside_s},
    }


def shown(asked: list[Asked]) -> str:
    ttfts = [one.ttft_s for one in asked]
    return ", ".join(f"p{share} {percentile(ttfts, share / 100):.3f} s" for share in (50, 95, 99))


def write(found: dict[str, Any], **details: Any) -> None:
    idle, beside = (found["ttft_s"][name] for name in ("idle", "beside"))
    asked = {name: len(found["ttft_s"][name]) for name in ("idle", "beside")}
    spread = {
        name: {f"p{share}": percentile(found["ttft_s"][name], share / 100) for share in (50, 95, 99)}
        for name in ("idle", "beside")
    }
    details |= {"tokens": found["tokens"], "every_s": found["every_s"], "questions": asked, "long_s": found["long_s"]}
    details |= {"question_computes_s": found["question_computes_s"], "answer_tokens": ANSWER_TOKENS}
    ratio = percentile(beside, 0.99) / percentile(idle, 0.99)
    write_entry(
        "short_p99_ratio_beside_long",
        ratio,
        "ratio",
        better="lower",
        samples=beside,
        command=COMMAND,
        ttft_s=spread,
        **details,
    )
    write_entry(
        "interleave_cost_share",
        cost_share(found),
        "share",
        better="lower",
        samples=[cost_share(found)],
        command=COMMAND,
        **details,
    )


def cost_share(found: dict[str, Any]) -> float:
    """What the long prefill lost to being interleaved, the questions' own computing taken off."""
    alone_s, beside_s = found["long_s"]["alone"], found["long_s"]["beside"]
    own_s = found["question_computes_s"]["idle"] * len(found["ttft_s"]["beside"])
    return float((beside_s - own_s - alone_s) / alone_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_000, help="of the long document")
    parser.add_argument("--idle-seconds", type=float, default=150.0)
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a quiet machine")
    parser.add_argument("--dry", action="store_true", help="write no figures")
    arguments = parser.parse_args()
    load = 0.0 if arguments.dry else wait_until_quiet(arguments.patience)
    with (
        tempfile.TemporaryDirectory(prefix="mixed-") as folder,
        LocalServer(Path(folder), disk_floor_bytes=0) as server,
    ):
        found = measure(server, arguments.tokens, arguments.idle_seconds)
    ratio = percentile(found["ttft_s"]["beside"], 0.99) / percentile(found["ttft_s"]["idle"], 0.99)
    print(f"p99 {ratio:.2f} × idle; interleaving cost {cost_share(found):.1%} of the long prefill", flush=True)
    if not arguments.dry:
        write(found, load_before=load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
