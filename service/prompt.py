"""The canonical prompt: model's system line → documents → caller's system text → conversation.

Because nothing of the request stands before the documents, neither a system prompt nor the place of the file in the
message changes the prefix, and a document's KV serves every question. Document text enters as token ids; what users
write is ordinary text that can't become a control token; only the chat template's own text can.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from engine.chain import TokenIds
from service.templates import ChatTemplate, TemplateError
from service.tokenizer import Piece, Tokenizer

log = logging.getLogger(__name__)

# What the default model saw in training; another model reads it as well as any other wrapper.
OPEN_FIRST = "Read the document.\n<document>\n"
OPEN_NEXT = "<document>\n"
CLOSE = "\n</document>\n"

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    role: Role
    text: str


@dataclass(frozen=True)
class Prompt:
    """`prefix_ids` are the same for every conversation about these documents; `question_ids` are the rest."""

    prefix_ids: TokenIds
    question_ids: TokenIds


class PromptFormat:
    """Renders prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self._template = template
        head = self._find_head()
        self.splits = head is not None
        if head is None:
            # Documents first, then the template's own text as a whole: still cacheable, but a shape that the model
            # was not trained on.
            bos = tokenizer.special_tokens.get("bos_token", "")
            head = bos if bos and self._render([Message("user", "a")])[0].text.startswith(bos) else ""
            log.warning("the chat template can't be split at a document: documents go before the rendered conversation")
        self._head = head
        self._head_ids = tokenizer.encode_pieces([Piece(head, trusted=True), Piece(OPEN_FIRST, trusted=False)])
        self._open_ids = tokenizer.encode(OPEN_NEXT)
        self._close_ids = tokenizer.encode(CLOSE)

    @classmethod
    def load(cls, folder: Path) -> "PromptFormat":
        """Of a model folder. Raises ModelError when tokenizer or chat template is missing or damaged."""
        tokenizer = Tokenizer.load(folder)
        return cls(tokenizer, ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens))

    def document_prefix(self, documents: Sequence[TokenIds]) -> TokenIds:
        """The cacheable prefix of one or more documents ([tokens] uint32 each), in this order.

        The prefix of the first n documents begins the prefix of n + 1.
        """
        if not documents:
            return np.empty(0, dtype=np.uint32)
        parts = [self._head_ids, documents[0], self._close_ids]
        for document in documents[1:]:
            parts += [self._open_ids, document, self._close_ids]
        return np.concatenate([np.asarray(part, dtype=np.uint32) for part in parts])

    def prefix_length(self, num_tokens: Sequence[int]) -> int:
        """Length of `document_prefix` for documents of so many tokens."""
        if not num_tokens:
            return 0
        further = len(num_tokens) - 1
        wrapping = len(self._head_ids) + further * len(self._open_ids) + len(num_tokens) * len(self._close_ids)
        return wrapping + sum(num_tokens)

    @property
    def head_length(self) -> int:
        """Tokens before the first document of a prefix."""
        return len(self._head_ids)

    def chat_prompt(self, messages: Sequence[Message], documents: Sequence[TokenIds]) -> Prompt:
        """The whole prompt of a conversation, ready for the assistant's turn. Raises TemplateError, ValueError."""
        return Prompt(self.document_prefix(documents), self.question(messages, with_documents=bool(documents)))

    def question(self, messages: Sequence[Message], *, with_documents: bool) -> TokenIds:
        """What follows the documents' prefix, [tokens] uint32; the whole prompt without documents.

        Raises ValueError when there is neither text nor document, TemplateError when the template refuses them.
        """
        system = _join(*(message.text for message in messages if message.role == "system"))
        turns = _merge([message for message in messages if message.role != "system"])
        if not with_documents:
            if not system and not any(turn.text for turn in turns):
                raise ValueError("the messages hold no text")
            return self.tokenizer.encode_pieces(self._render_plain(system, turns))
        if self.splits:
            head, tail = self._split(_fold(system, turns))
            if head == self._head:
                return self.tokenizer.encode_pieces(tail)
            log.warning("the chat template depends on the conversation before its first message: rendered apart")
        pieces = self._render_plain(system, turns)
        first = pieces[0]
        bos = self.tokenizer.special_tokens.get("bos_token", "")
        if bos and first.trusted and first.text.startswith(bos):
            pieces[0] = Piece(first.text.removeprefix(bos), trusted=True)
        return self.tokenizer.encode_pieces(pieces)

    def _find_head(self) -> str | None:
        """The template's text before the documents, or None where conversations of two shapes disagree on it."""
        shapes = [
            [Message("user", "a")],
            [Message("user", "b"), Message("assistant", "c"), Message("user", "d")],
        ]
        try:
            heads = {self._split(shape)[0] for shape in shapes}
        except TemplateError as error:
            log.warning("the chat template refuses a plain conversation: %s", error)
            return None
        return heads.pop() if len(heads) == 1 else None

    def _split(self, turns: Sequence[Message]) -> tuple[str | None, list[Piece]]:
        """(text before the documents, pieces after them), the documents at the start of the first user turn."""
        pieces = self._render(turns, documents=True)
        marks = [index for index, piece in enumerate(pieces) if piece is _DOCUMENTS]
        if len(marks) != 1 or any(not piece.trusted for piece in pieces[: marks[0]]):
            return None, pieces
        mark = marks[0]
        return "".join(piece.text for piece in pieces[:mark]), pieces[mark + 1 :]

    def _render_plain(self, system: str, turns: Sequence[Message]) -> list[Piece]:
        """Without documents the system text goes where the template wants it, if it wants one."""
        if not turns:
            return self._render([Message("user", system)])
        if system:
            try:
                pieces = self._render([Message("system", system), *turns])
            except TemplateError:
                log.debug("the chat template takes no system message: it goes before the first user text")
            else:
                if any(not piece.trusted and piece.text == system.strip() for piece in pieces):
                    return pieces
        return self._render(_fold(system, turns) if system else turns)

    def _render(self, messages: Sequence[Message], *, documents: bool = False) -> list[Piece]:
        """Render with a placeholder for each text, then cut there: no text ever passes through the template.

        White space around a text goes through, so that a template's `trim` does what it does.
        """
        texts: dict[str, Piece] = {}
        nonce = _nonce([self._template.source, *(message.text for message in messages)])

        def placeholder(piece: Piece) -> str:
            name = f"x{nonce}y{len(texts)}z"
            texts[name] = piece
            return name

        rendered_messages = []
        for message in messages:
            core = message.text.strip()
            before, _, after = message.text.partition(core) if core else (message.text, "", "")
            content = before + placeholder(Piece(core, trusted=False)) + after if core else before
            if documents and message.role == "user":
                content = placeholder(_DOCUMENTS) + content
                documents = False
            rendered_messages.append({"role": message.role, "content": content})
        rendered = self._template.render(rendered_messages)

        pieces: list[Piece] = []
        for position, part in enumerate(rendered.split(f"x{nonce}y")):
            if position == 0:
                pieces.append(Piece(part, trusted=True))
                continue
            number, _, rest = part.partition("z")
            pieces.append(texts[f"x{nonce}y{number}z"])
            pieces.append(Piece(rest, trusted=True))
        return pieces


_DOCUMENTS = Piece("", trusted=False)  # compared by identity


def _nonce(texts: Sequence[str]) -> str:
    """Letters and digits that occur in none of `texts`."""
    while True:
        nonce = secrets.token_hex(16)
        if not any(nonce in text for text in texts):
            return nonce


def _merge(turns: Sequence[Message]) -> list[Message]:
    """Neighbouring turns of one role become one: many templates insist that roles alternate."""
    merged: list[Message] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role:
            merged[-1] = Message(turn.role, _join(merged[-1].text, turn.text))
        else:
            merged.append(turn)
    return merged


def _fold(system: str, turns: Sequence[Message]) -> list[Message]:
    """The caller's system text at the start of the first turn, which becomes a user turn if it isn't one."""
    if not turns or turns[0].role != "user":
        return [Message("user", system), *turns]
    return [Message("user", _join(system, turns[0].text)), *turns[1:]]


def _join(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
