"""How API processes know that a worker lives, and with which engine: a small file, touched each second."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from engine.interfaces import Engine, Fidelity

SEEN_S = 10.0
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)


class Presence:
    """The worker's side."""

    def __init__(self, data_dir: Path, engine: Engine) -> None:
        """Takes effect with the first `beat`."""
        self._path = data_dir / "workers" / f"{os.getpid()}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        digests = {fidelity: engine.digest(fidelity) for fidelity in FIDELITIES}
        self._text = json.dumps({"process": os.getpid(), "digests": digests})

    def beat(self) -> None:
        if self._path.exists():
            os.utime(self._path)
            return
        scratch = self._path.with_suffix(".new")
        scratch.write_text(self._text, encoding="utf-8")
        scratch.rename(self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Workers:
    """The API's side. Files of killed workers grow old and are removed."""

    def __init__(self, data_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = data_dir / "workers"
        self._clock = clock

    def seen(self) -> bool:
        """Whether a worker with a loaded model was heard of in the last SEEN_S."""
        return self._newest() is not None

    def digest(self, fidelity: str) -> str | None:
        """What KV of this fidelity is made under now; None while no worker is seen."""
        newest = self._newest()
        if newest is None:
            return None
        try:
            digests: dict[str, str] = json.loads(newest.read_text(encoding="utf-8"))["digests"]
        except (OSError, ValueError):  # gone meanwhile
            return None
        return digests.get(fidelity)

    def names(self) -> list[str]:
        """Of the workers that live, as jobs name them."""
        return sorted(f"{os.uname().nodename}-{path.stem}" for _, path in self._alive())

    def _newest(self) -> Path | None:
        alive = self._alive()
        return max(alive)[1] if alive else None

    def _alive(self) -> list[tuple[float, Path]]:
        alive = []
        for path in self._folder.glob("*.json"):
            try:
                at = path.stat().st_mtime
            except FileNotFoundError:
                continue
            if abs(self._clock() - at) <= SEEN_S:
                alive.append((at, path))
            else:
                path.unlink(missing_ok=True)
        return alive
