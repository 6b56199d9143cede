"""The model that this server answers for: its name, its limits and its prompt format. No weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model_folder import trained_tokens
from service.prompt import PromptFormat
from service.tokenizer import read_json

DEFAULT_MODEL_ID = "smollm2-135m-long"


@dataclass(frozen=True)
class ServedModel:
    id: str
    aliases: frozenset[str]
    max_positions: int
    created_at: int  # unix seconds: of the model folder
    prompts: PromptFormat
    trained_tokens: int | None = None  # fewer than max_positions: longer documents come with a warning

    @classmethod
    def load(cls, name: str, folder: Path) -> "ServedModel":
        """`name` is the setting (default, a folder or a hub id), `folder` what it was resolved to.

        Raises ModelError when configuration, tokenizer or chat template is missing or damaged.
        """
        max_positions = _max_positions(read_json(folder / "config.json"))
        if max_positions is None:
            raise ModelError(f"{folder / 'config.json'} has no max_position_embeddings")
        is_folder = Path(name).expanduser().is_dir()
        model_id = DEFAULT_MODEL_ID if name == "default" else folder.name if is_folder else name
        return cls(
            id=model_id,
            aliases=frozenset({name, model_id}),
            max_positions=max_positions,
            created_at=int((folder / "config.json").stat().st_mtime),
            prompts=PromptFormat.load(folder),
            trained_tokens=trained_tokens(name),
        )

    def view(self) -> dict[str, Any]:
        """A model in the OpenAI shape."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created_at,
            "owned_by": "foreword",
            "max_model_len": self.max_positions,
        }


def _max_positions(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config") or config
    value = text.get("max_position_embeddings")
    return int(value) if value else None
