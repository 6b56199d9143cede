"""A model's own chat template, rendered in a sandbox with the variables that transformers documents for templates."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from engine.errors import ModelError
from service.tokenizer import read_json

# A template that prints the day it runs on would give every day another prefix and so another KV.
PINNED_DATE = datetime(2024, 7, 26)


class TemplateError(Exception):
    """The template refused these messages; the text is its own reason."""


class ChatTemplate:
    """`render(messages)` gives the prompt's text, ready for the assistant's turn."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError when `source` isn't valid Jinja."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, folder: Path, *, special_tokens: Mapping[str, str]) -> "ChatTemplate":
        """From chat_template.jinja, or the older places. Raises ModelError where the folder has none."""
        source = _find_source(folder)
        if source is None:
            raise ModelError(
                f"{folder} has no chat template (chat_template.jinja or `chat_template` in tokenizer_config.json); "
                "a chat or instruct model is expected"
            )
        return cls(source, special_tokens=special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Text of the whole prompt. Raises TemplateError when the template refuses the messages."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                date_string=PINNED_DATE.strftime("%d %b %Y"),
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateError(str(error)) from error


def _find_source(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = read_json(folder / name).get("chat_template")
        if isinstance(source, str):
            return source
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" in named:
                return str(named["default"])
    return None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's tokens for training; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Any) -> list[Any]:
        next(parser.stream)
        body: list[Any] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = PINNED_DATE.strftime
    return environment


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """jinja2's own filter escapes HTML, which a prompt isn't."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> Callable[..., None]:
    raise jinja2.TemplateError(message)
