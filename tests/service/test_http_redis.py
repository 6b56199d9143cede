"""What the API keeps, over Redis: two API processes, one worker with a fake engine; one API is killed on the way."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator

import pytest
from openai import OpenAI, RateLimitError, UnprocessableEntityError

from loadtests.cluster import Cluster, Member, until
from loadtests.redis_server import RedisServer
from tests.service.prompt_models import save_folder
from tests.service.test_http_webhooks import listening

FAKE = ("-m", "tests.service.fake_worker")
MODEL = "model"  # the name of its folder


class Pair:
    def __init__(self, cluster: Cluster, redis: RedisServer) -> None:
        self.redis = redis
        self.apis = [cluster.api(name) for name in ("api-1", "api-2")]
        self.worker = cluster.worker("worker")

    def client(self, number: int, key: str = "ann") -> OpenAI:
        return OpenAI(base_url=f"{self.apis[number].url}/v1", api_key=key, max_retries=0, timeout=60)

    def both(self, key: str = "ann") -> tuple[OpenAI, OpenAI]:
        return self.client(0, key), self.client(1, key)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    limits = {"ann": {}, "slow": {"requests_per_minute": 4}}
    keys = [
        {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name, "limits": limit}
        for name, limit in limits.items()
    ]
    (folder / "keys.json").write_text(json.dumps(keys))
    settings = {
        "model": save_folder(folder / MODEL, "chatml"),
        "api_keys_file": folder / "keys.json",
        "webhook_allow_private": True,
    }
    with contextlib.ExitStack() as stack:
        redis = RedisServer(folder / "redis").start()
        stack.callback(redis.__exit__, None, None, None)
        pair = Pair(stack.enter_context(Cluster(folder, redis.url, worker=FAKE, **settings)), redis)
        until(lambda: all(api.answers("/readyz") == 200 for api in pair.apis), 90)
        yield pair


def document(client: OpenAI, text: str) -> str:
    file = client.files.create(file=("doc.txt", text.encode()), purpose="user_data")
    return client.files.wait_for_processing(file.id, poll_interval=0.1).id


def test_parts_go_to_either_process(pair: Pair) -> None:
    one, other = pair.both()
    upload = one.uploads.create(bytes=6, filename="a.txt", mime_type="text/plain", purpose="user_data")
    parts = [client.uploads.parts.create(upload.id, data=data).id for client, data in ((other, b"abc"), (one, b"def"))]
    done = other.uploads.complete(upload.id, part_ids=parts)
    assert one.files.content(done.file.id).read() == b"abcdef"


def test_a_response_is_read_through_either_process(pair: Pair) -> None:
    one, other = pair.both()
    file_id = document(one, "read me from anywhere")
    content = [{"type": "input_file", "file_id": file_id}, {"type": "input_text", "text": "how long?"}]
    with listening() as target:
        endpoint = other.webhooks.create(name="x", url=target.url, event_types=["response.completed"])
        response = one.responses.create(model=MODEL, input=[{"role": "user", "content": content}], background=True)
        events = list(other.responses.retrieve(response.id, stream=True))
        assert events[-1].type == "response.completed"
        assert list(one.responses.retrieve(response.id, stream=True, starting_after=3)) == events[4:]
        until(lambda: target.got, 30)
        headers, body = target.got[0]
        assert one.webhooks.unwrap(body, headers, secret=endpoint.signing_secret).data.id == response.id
        other.webhooks.delete(endpoint.id)
    more = other.responses.create(model=MODEL, input="and now?", previous_response_id=response.id)
    assert more.status == "completed"
    one.files.delete(file_id)
    answer = [client.responses.with_raw_response for client in (one, other)]
    for raw in answer:
        with pytest.raises(Exception, match="deleted"):
            raw.retrieve(response.id)


def test_keys_and_limits_are_counted_together(pair: Pair) -> None:
    one, other = pair.both()
    headers = {"Idempotency-Key": "once"}
    first = one.files.create(file=("a.txt", b"once"), purpose="user_data", extra_headers=headers)
    assert other.files.create(file=("a.txt", b"once"), purpose="user_data", extra_headers=headers) == first
    with pytest.raises(UnprocessableEntityError):
        other.files.create(file=("a.txt", b"twice"), purpose="user_data", extra_headers=headers)
    slow = pair.both("slow")
    for number in range(4):
        slow[number % 2].models.list()
    for client in slow:
        with pytest.raises(RateLimitError):
            client.models.list()


def test_a_batch_outlives_the_process_that_began_it(pair: Pair) -> None:
    one, other = pair.both()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "STORY"}], "max_tokens": 80}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(16)]
    file = one.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = one.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until(lambda: other.batches.retrieve(batch.id).request_counts.completed, 60)
    keeper: Member = pair.apis[0]
    keeper.kill()
    due = "{foreword}:objects:batch:due"
    pair.redis.client.zadd(due, {f"{batch.id}\nann": time.time()})  # as when its lease has run out
    until(lambda: other.batches.retrieve(batch.id).status == "completed", 60)
    done = other.batches.retrieve(batch.id)
    assert done.request_counts.to_dict() == {"total": 16, "completed": 16, "failed": 0}
    rows = [json.loads(line) for line in other.files.content(done.output_file_id).text.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(str(number) for number in range(16))
