"""What POST /v1/responses may hold, and the chat request that it means. What has no meaning here is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from service.errors import InvalidRequest, UnsupportedOption
from service.schemas import LABELS, ChatMessage, ChatRequest, Sampling

# Options of the OpenAI API whose named values ask for nothing that we would not do anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "max_tool_calls": (),
    "include": ([],),
    "reasoning": ({"effort": "none"}, {}),
    "text": ({"format": {"type": "text"}}, {}),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "top_logprobs": (0,),
    "background_options": ({},),
    "image": (),
}
_TEXTS = ("input_text", "output_text", "text")
_IGNORED = frozenset({"id", "status", "phase", "type"})  # of messages that were answers before
MAX_METADATA = 16


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InputText(BaseModel):
    """Also an earlier answer's `output_text`, sent back with all it had."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputFile(_Body):
    """Either `file_id`, or `file_data` (base64 or a data URL) with its `filename`."""

    type: Literal["input_file"]
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None
    detail: Literal["auto", "low", "high"] = "auto"  # of pictures of pages, which aren't made here
    prompt_cache_breakpoint: dict[str, Any] | None = None  # every document is one

    @model_validator(mode="after")
    def _one_of_both(self) -> "InputFile":
        if (self.file_id is None) == (self.file_data is None):
            raise ValueError("exactly one of file_id and file_data is expected")
        return self


class InputMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[InputText | InputFile, Field(discriminator="type")]]

    @property
    def files(self) -> list[InputFile]:
        return [part for part in self.content if isinstance(part, InputFile)] if isinstance(self.content, list) else []

    def as_chat(self) -> ChatMessage:
        """Raises ValidationError."""
        if isinstance(self.content, str):
            return ChatMessage(role=self.role, content=self.content)
        parts: list[dict[str, Any]] = []
        for part in self.content:
            if isinstance(part, InputText):
                parts.append({"type": "text", "text": part.text})
            else:
                file = {"file_id": part.file_id, "file_data": part.file_data, "filename": part.filename}
                parts.append({"type": "file", "file": file})
        return ChatMessage.model_validate({"role": self.role, "content": parts})


class ResponseRequest(Sampling):
    model: str
    input: list[InputMessage] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        default=None, max_length=MAX_METADATA
    )
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None  # there is nothing to obfuscate

    @field_validator("store", "background", "stream", mode="before")
    @classmethod
    def _null_is_left_out(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    def as_chat(self, earlier: list[ChatMessage]) -> ChatRequest:
        """The same question about `earlier` messages and these; instructions are this turn's alone."""
        instructions = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        values = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        values["max_completion_tokens"] = self.max_output_tokens
        messages = [*instructions, *earlier, *(message.as_chat() for message in self.input)]
        return ChatRequest.model_validate({"model": self.model, "messages": messages, **values})


def parse_response(body: dict[str, Any]) -> ResponseRequest:
    """Raises UnsupportedOption for what the service can't do, InvalidRequest or ValidationError for what is wrong."""
    options = dict(body)
    for name in body:
        if name in LABELS and name != "metadata":
            del options[name]
        elif name in _NEUTRAL:
            value = options.pop(name)
            if value is not None and value not in _NEUTRAL[name]:
                raise UnsupportedOption(f"{name}={value!r} is not supported by this model", param=name)
        elif name not in ResponseRequest.model_fields or name in ("max_tokens", "max_completion_tokens"):
            raise InvalidRequest(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
    given = options.get("input")
    if isinstance(given, str):
        options["input"] = [{"role": "user", "content": given}]
    elif isinstance(given, list):
        options["input"] = [_message(item, f"input.{number}") for number, item in enumerate(given)]
    request = ResponseRequest.model_validate(options)
    if request.background and not request.store:
        raise InvalidRequest("background: only a stored response can be made in the background", param="background")
    return request


def _message(item: Any, place: str) -> Any:
    """Names what is unsupported before the schema could only call it unknown."""
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if kind != "message":
        raise UnsupportedOption(f"input items of type {kind!r} are not supported, 'message' is", param=f"{place}.type")
    message = {name: value for name, value in item.items() if name not in _IGNORED}
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else []):
        part_kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and part_kind not in (*_TEXTS, "input_file"):
            raise UnsupportedOption(
                f"content of type {part_kind!r} is not supported, 'input_text' and 'input_file' are",
                param=f"{place}.content.{number}.type",
            )
        if part_kind == "input_file":
            if part.get("file_url") is not None:
                raise UnsupportedOption("file_url is not supported: upload the file", param=f"{place}.content.{number}")
            if item.get("role") != "user":
                raise InvalidRequest("files belong in user messages", param=f"{place}.content.{number}")
    return message
