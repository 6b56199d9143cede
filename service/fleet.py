"""Which workers live, across machines, what all of them have in common, and where each document's KV lies: in Redis.

A *site* is one folder of KV. The store under it is made for the processes of one machine (SQLite and file locks), so a
site never spans machines; workers that share a data folder share it.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.interfaces import Engine
from engine.kv_store import VerifyReport
from service.backend import FleetDiffers, KVReport
from service.dependencies import KVDescriptions
from service.presence import FIDELITIES
from service.queue.base import QueueUnavailable
from service.queue.redis_store import RedisStore, dumps
from service.served_model import ServedModel

log = logging.getLogger(__name__)

LOOK_S = 1.0
TELL_ANEW = 60  # beats


@dataclass(frozen=True)
class Identity:
    """What all workers of one Redis have in common."""

    model: str
    tokenizer: str
    digests: Mapping[str, str]  # by fidelity

    @classmethod
    def of(cls, model: ServedModel, engine: Engine) -> "Identity":
        digests: dict[str, str] = {fidelity: engine.digest(fidelity) for fidelity in FIDELITIES}
        return cls(model.id, model.prompts.tokenizer.digest, digests)

    def text(self) -> str:
        return json.dumps({"model": self.model, "tokenizer": self.tokenizer, "digests": self.digests}, sort_keys=True)

    @classmethod
    def read(cls, text: str) -> "Identity":
        fields: dict[str, Any] = json.loads(text)
        return cls(fields["model"], fields["tokenizer"], fields["digests"])


def differing(mine: Identity, fleet: Identity, who: str) -> FleetDiffers:
    """Names what differs."""
    ours, theirs = _flat(mine), _flat(fleet)
    names = [name for name in ours if ours[name] != theirs.get(name)]
    shown = "; ".join(f"{name} is {ours[name][:24]} here and {theirs.get(name, '')[:24]} there" for name in names)
    return FleetDiffers(f"refused: {shown} (worker {who}). All workers of one Redis serve one model in one way")


def _flat(identity: Identity) -> dict[str, str]:
    digests = {f"digest of {fidelity}": digest for fidelity, digest in identity.digests.items()}
    return {"model": identity.model, "tokenizer": identity.tokenizer, **digests}


def site_of(data_dir: Path) -> str:
    """The name of this data folder's KV, made on first use."""
    path = data_dir / "kv-site"
    if not path.exists():
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = data_dir / f".kv-site-{os.getpid()}-{secrets.token_hex(4)}"
        scratch.write_text(f"{os.uname().nodename}-{secrets.token_hex(6)}", encoding="ascii")
        try:
            os.link(scratch, path)  # whoever comes first wins
        except FileExistsError:
            pass
        finally:
            scratch.unlink()
    return path.read_text(encoding="ascii").strip()


class FleetMember:
    """A worker's sign of life, with what its KV folder holds. Implements service.backend.SignOfLife."""

    def __init__(self, store: RedisStore, name: str, site: str, identity: Identity, kv: KVReport) -> None:
        self._store, self._name, self._site, self._identity, self._kv = store, name, site, identity, kv
        self._told: dict[str, int] = {}
        self._beats = 0

    def beat(self) -> None:
        """Raises FleetDiffers, QueueUnavailable."""
        holders = self._kv.holders()
        about = {"worker": self._name, "site": self._site, "process": os.getpid()}
        status, *others = self._store.run("beat", self._name, self._site, dumps(about), self._identity.text())
        if status == b"differs":
            raise differing(self._identity, Identity.read(others[0].decode()), others[1].decode())
        self._tell(holders)

    def _tell(self, holders: Mapping[str, int]) -> None:
        """Where KV lies is a hint for affinity and a figure for users: it may lag by a second."""
        mine = self._store.key("kv_of", self._site)
        if self._beats % TELL_ANEW == 0:  # an earlier process of this site may have told of KV that is gone
            known = self._store.command("smembers", mine)
            self._told = {name.decode(): -1 for name in known}
        self._beats += 1
        news = {holder: size for holder, size in holders.items() if self._told.get(holder) != size}
        gone = [holder for holder in self._told if holder not in holders]
        if not news and not gone:
            return

        def write(client: Any) -> None:
            with client.pipeline(transaction=False) as pipe:
                for holder, size in news.items():
                    pipe.hset(self._store.key("kv_at", holder), self._site, dumps({"disk": size}))
                    pipe.sadd(mine, holder)
                for holder in gone:
                    pipe.hdel(self._store.key("kv_at", holder), self._site)
                    pipe.srem(mine, holder)
                pipe.execute()

        self._store.ask(write)
        self._told = dict(holders)

    def close(self) -> None:
        try:
            self._store.run("leave", self._name)
        except QueueUnavailable as error:
            log.warning("not signed off: %s", error)


class Fleet:
    """The API's side. Implements service.backend.WorkersSeen."""

    def __init__(self, store: RedisStore, model: ServedModel) -> None:
        """`model` is the API's own: workers that serve another are none to it."""
        self._store = store
        self._model, self._tokenizer = model.id, model.prompts.tokenizer.digest
        self._looked_at = -LOOK_S
        self._identity: Identity | None = None
        self._living: list[dict[str, Any]] = []

    def seen(self) -> bool:
        identity, living = self._look()
        return bool(living) and identity is not None and self._mine(identity) == identity

    def names(self) -> list[str]:
        """Of the workers that live, as jobs name them."""
        return sorted(str(worker["worker"]) for worker in self._look()[1])

    def digest(self, fidelity: str) -> str | None:
        identity, living = self._look()
        return identity.digests.get(fidelity) if identity is not None and living else None

    def check(self) -> None:
        """Raises FleetDiffers where living workers serve another model, QueueUnavailable."""
        self._read()
        if self._identity is None or not self._living:
            return
        mine = self._mine(self._identity)
        if mine != self._identity:
            raise differing(mine, self._identity, self._living[0]["worker"])

    def _mine(self, fleet: Identity) -> Identity:
        """What the fleet would have in common if it served this API's model."""
        return Identity(self._model, self._tokenizer, fleet.digests)

    def _look(self) -> tuple[Identity | None, list[dict[str, Any]]]:
        """As of a second ago at most; nobody where Redis is away."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            try:
                self._read()
            except QueueUnavailable:
                self._identity, self._living = None, []
        return self._identity, self._living

    def _read(self) -> None:
        fleet, living = self._store.run("living")
        self._identity = Identity.read(fleet.decode()) if fleet else None
        self._living = [json.loads(worker) for worker in living]
        self._looked_at = time.monotonic()


class FleetKV:
    """KV on all machines, as an API process sees it. Implements service.dependencies.KVDescriptions."""

    def __init__(self, store: RedisStore, fleet: Fleet, local: KVDescriptions) -> None:
        """`local` is this machine's own KV folder, the one whose bytes can be looked at."""
        self._store, self._fleet, self._local = store, fleet, local

    def describe(self, holders: Sequence[str]) -> Mapping[str, Mapping[str, int]]:
        def read(client: Any) -> Any:
            with client.pipeline(transaction=False) as pipe:
                for holder in holders:
                    pipe.hvals(self._store.key("kv_at", holder))
                return pipe.execute()

        found = self._store.ask(read) if holders else []
        return {holder: _total(sites) for holder, sites in zip(holders, found, strict=True)}

    def usage(self) -> Mapping[str, int]:
        """Each worker shows its own, beside the cap and the disk that it has (service.metrics_port)."""
        return {}

    def verify(self, holder: str | None = None) -> VerifyReport:
        """Of what lies on this machine."""
        return self._local.verify(holder)

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        """Each site looks the new policy up when it hears of the change."""
        self._store.run("policy", holder)


def _total(sites: Sequence[bytes]) -> dict[str, int]:
    """Bytes by tier, from what each site tells."""
    total: dict[str, int] = {}
    for site in sites:
        for tier, size in json.loads(site).items():
            total[tier] = total.get(tier, 0) + int(size)
    return total
