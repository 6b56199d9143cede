"""From chat messages to texts and files: which documents, in order of first mention, and who said what."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from service.errors import InvalidRequest
from service.prompt import Message
from service.schemas import ChatMessage, ChatRequest, FileReference, TextPart


@dataclass(frozen=True)
class Conversation:
    messages: Sequence[Message]
    files: Sequence[FileReference]  # each once


def read_conversation(messages: Sequence[ChatMessage]) -> Conversation:
    """Texts and files of a conversation; a file counts where it is first mentioned."""
    spoken: list[Message] = []
    files: dict[tuple[str | None, str | None, str | None], FileReference] = {}
    for message in messages:
        texts: list[str] = []
        if isinstance(message.content, str):
            texts.append(message.content)
        for part in message.content if isinstance(message.content, list) else []:
            if isinstance(part, TextPart):
                texts.append(part.text)
            else:
                reference = part.file
                files.setdefault((reference.file_id, reference.filename, reference.file_data), reference)
        role = "system" if message.role == "developer" else message.role
        spoken.append(Message(role, "\n".join(texts)))
    return Conversation(spoken, list(files.values()))


def handles_of(chat: ChatRequest) -> list[str]:
    """Of the files that a conversation mentions, each once. Raises InvalidRequest for one that is given inline."""
    ids: list[str] = []
    for reference in read_conversation(chat.messages).files:
        if reference.file_id is None:
            raise InvalidRequest("file_data: a file that was uploaded is expected here", param="messages")
        if reference.file_id not in ids:
            ids.append(reference.file_id)
    return ids


def decode_inline(reference: FileReference) -> tuple[str, bytes]:
    """(filename, bytes) of a file given as base64 or as a data URL. Raises InvalidRequest."""
    data = reference.file_data or ""
    if data.startswith("data:"):
        header, _, data = data.partition(",")
        if not header.endswith(";base64"):
            raise InvalidRequest("file_data: a data URL with ';base64,' is expected", param="messages")
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"file_data is not valid base64: {error}", param="messages") from error
    if not reference.filename:
        raise InvalidRequest("file_data needs a filename", param="messages", code="missing_required_parameter")
    return reference.filename, content
