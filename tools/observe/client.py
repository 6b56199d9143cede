"""What is done to a server so that there is something to see, over its HTTP API."""

import io
import time
import zipfile
from collections.abc import Mapping
from typing import Any

import httpx


class Client:
    """Uploads, waits and asks, as one user would."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=300)

    def upload(self, name: str, data: bytes, headers: Mapping[str, str] | None = None, **fields: str) -> str:
        """Returns the file's id."""
        form = {"purpose": "user_data", **fields}
        answer = self.http.post("/v1/files", files={"file": (name, data)}, data=form, headers=headers)
        answer.raise_for_status()
        return str(answer.json()["id"])

    def document(self, file_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/documents/{file_id}")
        answer.raise_for_status()
        record: dict[str, Any] = answer.json()
        return record

    def wait(self, file_id: str, *, progress: float | None = None, timeout_s: float = 300) -> dict[str, Any]:
        """Until the document is ready or failed, or its prefill has come as far as `progress`. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            document = self.document(file_id)
            if document["state"] in ("ready", "error"):
                return document
            if progress is not None and document["state"] == "prefill" and document["progress"] >= progress:
                return document
            time.sleep(0.05)
        raise TimeoutError(f"{file_id} is still {document['state']} at {document['progress']} after {timeout_s} s")

    def ask(
        self, file_id: str, question: str, *, max_tokens: int = 16, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The chat completion."""
        content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
        body = {
            "model": self.http.get("/v1/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer = self.http.post("/v1/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        completion: dict[str, Any] = answer.json()
        return completion

    def delete(self, file_id: str) -> None:
        self.http.delete(f"/v1/files/{file_id}").raise_for_status()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()


def zip_of(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()
