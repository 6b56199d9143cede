"""One user over the public API. What went wrong is a code in the reply, never an exception: load goes on.

Plain httpx, which runs in threads as in the greenlets that locust patches sockets for.
"""

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from loadtests.http.texts import Text

TIMEOUT_S = 900.0  # whoever measures may have been stopped meanwhile
POLL_S = 0.1

Leave = Literal["prefill", "stream"]


@dataclass(frozen=True)
class Reply:
    """`code`: ok, left (as asked for), or the error's. `ttft_s` from `arrived_at` to the first text."""

    code: str
    seconds: float
    ttft_s: float | None = None
    cache_state: str | None = None
    server_ttft_s: float | None = None
    text: str = ""


class Client:
    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits, transport=transport)

    def close(self) -> None:
        self.http.close()

    def upload(self, text: Text) -> tuple[str, str]:
        """The file's id ("" where it was refused) and the code."""
        return self.upload_bytes(text.name, text.data)

    def upload_bytes(self, name: str, data: bytes) -> tuple[str, str]:
        try:
            answer = self.http.post("/v1/files", files={"file": (name, data)}, data={"purpose": "user_data"})
        except httpx.HTTPError as error:
            return "", type(error).__name__
        return ("", code_of(answer)) if answer.status_code != 200 else (str(answer.json()["id"]), "ok")

    def wait(self, file_id: str) -> tuple[dict[str, Any], str]:
        """The document when it is ready or failed, and its code."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                answer = self.http.get(f"/v1/documents/{file_id}")
            except httpx.HTTPError as error:
                return {}, type(error).__name__
            if answer.status_code != 200:
                return {}, code_of(answer)
            document: dict[str, Any] = answer.json()
            if document["state"] == "ready":
                return document, "ok"
            if document["state"] == "error":
                return document, str(document["error"]["code"])
            time.sleep(POLL_S)
        return {}, "wait_timeout"

    def delete(self, file_id: str) -> str:
        try:
            return code_of(self.http.delete(f"/v1/files/{file_id}"))
        except httpx.HTTPError as error:
            return type(error).__name__

    def get(self, path: str) -> tuple[dict[str, Any], str]:
        """What JSON came, {} where it was something else, and the code."""
        try:
            answer = self.http.get(path)
        except httpx.HTTPError as error:
            return {}, type(error).__name__
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return (answer.json() if is_json else {}), code_of(answer)

    def ask(
        self,
        file_id: str,
        question: str,
        *,
        max_tokens: int = 16,
        leave: Leave | None = None,
        arrived_at: float | None = None,
    ) -> Reply:
        """A streamed answer. `leave`: closes the connection at the first sign of a prefill, or behind the first text.

        `arrived_at` (time.monotonic) is when the request was due; late clients then don't look like fast servers.
        """
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    return Reply(code_of(answer), time.monotonic() - arrived_at)
                return _read(answer, arrived_at, leave)
        except httpx.HTTPError as error:
            return Reply(type(error).__name__, time.monotonic() - arrived_at)


def _read(answer: httpx.Response, arrived_at: float, leave: Leave | None) -> Reply:
    text, ttft_s, extras, ended = "", None, dict[str, Any](), False
    for line in answer.iter_lines():
        if line.startswith(":") and leave == "prefill":
            return Reply("left", time.monotonic() - arrived_at)
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            break
        chunk = json.loads(line[6:])
        if "error" in chunk:
            return Reply(str(chunk["error"]["code"]), time.monotonic() - arrived_at, ttft_s, text=text)
        piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
        if piece:
            ttft_s = time.monotonic() - arrived_at if ttft_s is None else ttft_s
            text += piece
            if leave == "stream":
                return Reply("left", time.monotonic() - arrived_at, ttft_s, text=text)
        extras = chunk.get("foreword", extras)
    code = "ok" if ended else "cut_off"
    seconds = time.monotonic() - arrived_at
    return Reply(code, seconds, ttft_s, extras.get("cache_state"), extras.get("ttft_s"), text)


def code_of(answer: httpx.Response) -> str:
    """ok, the code of an error in the OpenAI shape, or the status of something else."""
    if answer.status_code < 400:
        return "ok"
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{answer.status_code}"
