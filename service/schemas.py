"""What requests may hold. Options that this service has no meaning for are refused by name, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.interfaces import Fidelity
from service.errors import InvalidRequest, UnsupportedOption

Kind = Literal["auto", "repo", "bundle", "doc"]
Purpose = Literal["user_data", "assistants", "batch"]
MAX_EXPIRY_S = 2_592_000
Expiry = Annotated[int, Field(ge=1, le=MAX_EXPIRY_S)]
# A hundred years; infinity, which JSON can't say back, is more.
Lifetime = Annotated[float, Field(gt=0, le=3_155_760_000)]

# Options of the OpenAI API whose named values ask for nothing that we would not do anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "moderation": (),
}
# Labels that change no answer.
LABELS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileReference(_Body):
    """Either `file_id`, or `file_data` (base64 or a data URL) with its `filename`."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "FileReference":
        if (self.file_id is None) == (self.file_data is None):
            raise ValueError("exactly one of file_id and file_data is expected")
        return self


class TextPart(_Body):
    type: Literal["text"]
    text: str


class FilePart(_Body):
    type: Literal["file"]
    file: FileReference
    prompt_cache_breakpoint: dict[str, Any] | None = None  # every document is one


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[TextPart | FilePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None  # of an earlier answer, sent back


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(_Body):
    temperature: float = Field(default=0.0, ge=0, le=2)  # about documents, the likeliest answer is wanted
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    repetition_penalty: float = Field(default=1.0, gt=0, le=4)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    fidelity: Fidelity | None = None  # of the file where none is named

    @field_validator("temperature", "top_p", "top_k", "repetition_penalty", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > 4 or not all(stops):
            raise ValueError("at most 4 strings, none of them empty, are expected")
        return stops


class ChatRequest(Sampling):
    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stream", mode="before")
    @classmethod
    def _null_is_false(cls, value: Any) -> Any:
        return False if value is None else value


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Raises UnsupportedOption for what the service can't do, InvalidRequest or ValidationError for what is wrong."""
    options = dict(body)
    for name in body:
        if name in LABELS:
            del options[name]
        elif name in _NEUTRAL:
            value = options.pop(name)
            if value is not None and value not in _NEUTRAL[name]:
                raise UnsupportedOption(f"{name}={value!r} is not supported by this model", param=name)
        elif name not in ChatRequest.model_fields:
            raise InvalidRequest(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
    for number, message in enumerate(_dicts(options.get("messages"))):
        _check_message(message, f"messages.{number}")
    return ChatRequest.model_validate(options)


def _check_message(message: dict[str, Any], place: str) -> None:
    """Names what is unsupported before the schema could only call it unknown."""
    if message.get("role") in ("tool", "function") or message.get("tool_calls"):
        raise UnsupportedOption("tools are not supported by this model", param=f"{place}.role")
    for number, part in enumerate(_dicts(message.get("content"))):
        if part.get("type") not in ("text", "file"):
            raise UnsupportedOption(
                f"content parts of type {part.get('type')!r} are not supported, 'text' and 'file' are",
                param=f"{place}.content.{number}.type",
            )
        if part["type"] == "file" and message.get("role") != "user":
            raise InvalidRequest("files belong in user messages", param=f"{place}.content.{number}")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name) is None:
            message.pop(name, None)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


class UploadOptions(_Body):
    """Fields of an upload beside its bytes."""

    purpose: Purpose = "user_data"
    filename: str | None = Field(default=None, min_length=1, max_length=255)
    kind: Kind = "auto"
    priority: int = Field(default=0, ge=-5, le=5)
    fidelity: Fidelity = "default"
    base: str | None = None
    pin: bool = False
    kv_ttl_s: Lifetime | None = None
    expires_after_s: Expiry | None = None


class DocumentPatch(_Body):
    """What may change later; a field that is left out stays."""

    pin: bool | None = None
    kv_ttl_s: Lifetime | None = None
    expires_after_s: Expiry | None = None
    filename: str | None = Field(default=None, min_length=1, max_length=255)


class SummaryRequest(_Body):
    length: Literal["short", "medium", "long"] = "medium"
    focus: str | None = Field(default=None, max_length=2000)
    language: str | None = Field(default=None, max_length=100)
    quotes: int = Field(default=0, ge=0, le=50)  # how many are asked for
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=0.0, ge=0, le=2)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
