"""What must hold behind a scenario, asked of the server itself."""

import time
from collections.abc import Sequence

import httpx

from loadtests.http.client import Client
from loadtests.http.samples import Sample
from loadtests.http.scrape import Scrape, scrape

ANSWERS_END_S = 10.0
QUEUE_EMPTY_S = 120.0
IDLE_S = 1.0
IDLE_LOOKS = 5
LOOK_S = 0.1


def check_samples(samples: Sequence[Sample]) -> list[str]:
    """Faults in words: requests that failed, or none at all."""
    if not samples:
        return ["no request was made"]
    failed = [sample for sample in samples if sample.code not in ("ok", "left")]
    return [f"{len(failed)} of {len(samples)} requests failed, first: {failed[0]}"] if failed else []


def check_storm(
    url: str, admin_key: str | None, before: Scrape, samples: Sequence[Sample]
) -> tuple[list[str], dict[str, float]]:
    """Behind a storm of disconnects nothing runs on for nobody and nothing is lost. Returns faults and figures.

    Raises httpx.HTTPError where the server doesn't answer.
    """
    faults: list[str] = []
    steps = {
        step: sum(sample.step == step and sample.code == "left" for sample in samples)
        for step in ("leave stream", "leave prefill")
    }
    faults += [f"nobody did: {step}" for step, count in steps.items() if not count]
    client = Client(url, admin_key)
    try:
        answers_s = until_empty(client, ("answer",), ANSWERS_END_S)
        if answers_s is None:
            faults.append(f"answers went on for nobody {ANSWERS_END_S:.0f} s after the last client had gone")
        # Documents that weren't withdrawn are still to be read: their uploads asked for it.
        queue_s = until_empty(client, None, QUEUE_EMPTY_S)
        if queue_s is None:
            faults.append(f"the queue wasn't empty after {QUEUE_EMPTY_S:.0f} s")
        busy_s = _still_busy(url)
        if busy_s > 0:
            faults.append(f"the engine went on computing with an empty queue: {busy_s:.2f} s within {IDLE_S:.1f} s")
        counted = scrape(url).since(before)
        for state in ("failed", "dead"):
            lost = counted.total("foreword_jobs_ended_total", state=state)
            if lost:
                faults.append(f"{lost:.0f} jobs {state}")
        figures = {"answers_end_s": answers_s or 0.0, "queue_empty_s": queue_s or 0.0, "engine_busy_s": busy_s, **steps}
        figures["generated_tokens"] = counted.total("foreword_generated_tokens_total")
        return faults, figures
    finally:
        client.close()


def check_kept(url: str, keys: dict[str, str]) -> tuple[list[str], int]:
    """Every document that somebody kept is read; returns faults and how many there are."""
    faults, kept = [], 0
    for key in keys or {"": "local"}:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{url}/v1/files?limit=1000", headers=headers, timeout=60)
        answer.raise_for_status()
        for file in answer.json()["data"]:
            kept += 1
            if file["status"] != "processed":
                faults.append(f"{file['id']} ({file['filename']}) is {file['status']}: {file['status_details']}")
    return faults, kept


def until_empty(client: Client, kinds: Sequence[str] | None, timeout_s: float) -> float | None:
    """Seconds until no job of these kinds (None: any) waits or runs; None where some did in `timeout_s` of looking.

    Looks are counted, not the time between: who was stopped meanwhile looks as often as others.
    Raises httpx.HTTPError.
    """
    started = time.monotonic()
    for _ in range(round(timeout_s / LOOK_S)):
        queues, code = client.get("/v1/admin/queues")
        if code != "ok":
            raise httpx.HTTPError(f"/v1/admin/queues: {code}; a key with the admin right is needed")
        lanes = [lane for lane in queues["data"] if kinds is None or lane["kind"] in kinds]
        if not any(lane["queued"] or lane["running"] for lane in lanes):
            return round(time.monotonic() - started, 2)
        time.sleep(LOOK_S)
    return None


def _still_busy(url: str) -> float:
    """Seconds that the engine computed within the last of a few looks; 0 as soon as it computed nothing in one.

    What the last job took is counted a moment behind its end.
    """
    busy_s, before = 0.0, scrape(url)
    for _ in range(IDLE_LOOKS):
        time.sleep(IDLE_S)
        now = scrape(url)
        busy_s = now.since(before).total("foreword_device_seconds_total")
        if not busy_s:
            break
        before = now
    return busy_s
