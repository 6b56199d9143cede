"""Makes the default model's folders once: a lock against two processes, a temporary folder, one rename. Torch-free."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.default_model.gguf_source import find_gguf
from engine.default_model.tokenizer import write_tokenizer_files

# The number goes up whenever what is written changes.
NAME = "smollm2-135m-instruct-foreword-2"


def tokenizer_folder(cache_dir: Path) -> Path:
    """The folder with tokenizer, template and configuration, without weights; made if it isn't there.

    Raises ModelError if the package with the model is not installed.
    """
    return _make_once(cache_dir / f"{NAME}-tokenizer", _write_tokenizer)


def model_folder(cache_dir: Path) -> Path:
    """The whole model as a Hugging Face folder, weights included (269 MB); made if it isn't there.

    Raises ModelError if the package with the model is not installed.
    """
    tokenizer = tokenizer_folder(cache_dir)

    def write(folder: Path) -> None:
        from engine.default_model.weights import write_weights

        for file in tokenizer.iterdir():
            shutil.copyfile(file, folder / file.name)
        write_weights(find_gguf(), folder)

    return _make_once(cache_dir / NAME, write)


def _write_tokenizer(folder: Path) -> None:
    write_tokenizer_files(find_gguf(), folder)


def _make_once(folder: Path, write: Callable[[Path], None]) -> Path:
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        temporary.chmod(0o755)
        try:
            write(temporary)
            for file in temporary.iterdir():
                file.chmod(0o644)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(lock)
    return folder
