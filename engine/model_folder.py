"""Which folder holds the model: the default one, a local Hugging Face folder, or a hub id. Torch-free."""

import json
import re
from pathlib import Path

from engine import default_model
from engine.errors import ModelError
from engine.spec import load_spec
from engine.weight_names import check_names

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_NEEDED = ("config.json", "tokenizer.json")


def resolve_model(model: str, *, cache_dir: Path, weights: bool = True) -> Path:
    """The folder of `model`: "default", a local folder, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".

    With `weights=False` only configuration, tokenizer and template are made sure of; that needs no torch.
    Raises ModelError if the folder is missing or incomplete, or the hub can't be reached.
    """
    if model == "default":
        return default_model.model_folder(cache_dir) if weights else default_model.tokenizer_folder(cache_dir)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if not _HUB_ID.fullmatch(model):
            raise ModelError(f"no model folder at {model}; expected 'default', a Hugging Face folder or a hub id")
        folder = _hub_folder(model, weights=weights)
    _check(folder, weights=weights)
    return folder.resolve()


def trained_tokens(model: str) -> int | None:
    """The longest text that `model` was measured on; None where that is the number of its positions."""
    return default_model.TRAINED_TOKENS if model == "default" else None


def length_warning(num_tokens: int, trained: int | None) -> str | None:
    """What is to be said of a text that is longer than what its model was trained for, or None."""
    if trained is None or num_tokens <= trained:
        return None
    return f"{num_tokens} tokens are more than the {trained} that this model was trained for: answers may be worse"


def _hub_folder(model: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many unrelated types
        raise ModelError(f"{model} is no local folder and could not be fetched from the hub: {error}") from error


def _check(folder: Path, *, weights: bool) -> None:
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if weights:
        missing += _missing_weights(folder)
    if missing:
        raise ModelError(f"the model folder {folder} is incomplete: {', '.join(missing)} missing")
    if weights:
        check_names(folder, load_spec(folder))


def _missing_weights(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from error
        return sorted(name for name in shards if not (folder / name).is_file())
    return [] if (folder / "model.safetensors").is_file() else ["model.safetensors"]
