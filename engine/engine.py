"""The engine on one device: opens a model, starts prefills and answers on one KV store."""

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.answer import DenseAnswer
from engine.chain import Segment, TokenIds, segment_chain
from engine.decode_pool import DecodePool
from engine.device_kv import DeviceKV
from engine.digest import EngineDigest
from engine.errors import ContextTooLong, InvalidRequest, KVMissing, ModelError
from engine.interfaces import AnswerRequest, Fidelity, KVLayout, KVStore, PrefillRequest
from engine.kv_format import KVFormat, kv_format
from engine.kv_plan import KVPlanner, KVWay
from engine.kv_source import KVSource
from engine.model import Model, load_model
from engine.parallel.group import RankGroup
from engine.parallel.process import RankParts
from engine.prefill import LayerMajorPrefill
from engine.prefill_rows import PrefillRows, RowsInHalves, prefill_rows
from engine.prefix_kv import Prefix, PrefixKV
from engine.resume import ResumeFolder
from engine.sampling import check_sampling
from engine.sparse.settings import SparseSettings, default_settings, for_fidelity
from engine.threads import keep_freed_memory
from engine.work import MachineRates, PrefillWork, gpu_rates
from kernels import dispatch, selftest

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class LocalEngine:
    """`Engine` of engine.interfaces on one CPU or GPU."""

    def __init__(
        self,
        model: Model,
        decode: Callable[[Sequence[int]], str],
        store: KVStore,
        *,
        resume: ResumeFolder | None = None,
        sparse: SparseSettings | None = None,
        checkpoint_s: float = 5.0,
        rates: MachineRates | None = None,
        kv: KVFormat | None = None,
        ranks: RankGroup | None = None,
        planner: KVPlanner | None = None,
    ) -> None:
        """`planner`: how answers come by stored KV on a slow tier. `ranks` are closed with the engine.

        Raises ModelError where a head config is another model's.
        """
        self._model, self._decode, self.store = model, decode, store
        self._resume, self._checkpoint_s = resume, checkpoint_s
        self._sparse = sparse or default_settings(model.device.type)
        self._kv = kv or KVFormat(model.dtype)
        self._ranks = ranks
        if self._sparse.head_config is not None:
            self._sparse.head_config.check(num_layers=model.spec.num_layers, heads=model.spec.heads)
        self._work = PrefillWork(model.spec, rates or MachineRates())
        self._planner = planner or KVPlanner(self._work, self._kv.layout(model.spec))
        self._prefixes: dict[str, Prefix] = {}  # by the last segment's key, while answers hold them
        self._pool = DecodePool(model)
        self._device_kv = DeviceKV(model.device, store)
        self.max_positions = model.spec.max_positions

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return self._model.device.type

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._model.spec.eos_ids

    def digest(self, fidelity: Fidelity) -> str:
        """Hex digest of everything besides tokens and salt that KV made under `fidelity` depends on."""
        model = self._model
        return EngineDigest(
            weights=model.weights_digest,
            architecture=repr(model.spec),
            linear_dtype=model.linear_dtype or str(model.dtype),
            kv_format=str(self._kv.dtype),
            numerics=model.device.type,
            sparse=for_fidelity(self._sparse, fidelity),
        ).hex

    def cached_tokens(self, tokens: TokenIds, *, salt: bytes, fidelity: Fidelity) -> int:
        chain = self.chain(tokens, salt, fidelity)
        stored = self.store.match(chain)
        return chain[stored - 1].end if stored else 0

    def start_prefill(self, request: PrefillRequest) -> LayerMajorPrefill:
        """Raises ContextTooLong, InvalidRequest for an empty prefix, StorageFull, RankLost."""
        if len(request.tokens) == 0:
            raise InvalidRequest("got an empty prefix, expected at least one token")
        if len(request.tokens) > self.max_positions:
            raise ContextTooLong(len(request.tokens), self.max_positions)
        self._device_kv.drop_unstored()
        if self.device == "cuda":
            spec, itemsize = self._model.spec, self._model.dtype.itemsize
            row_bytes = spec.hidden * itemsize + spec.kv_bytes_per_token(itemsize)
            self._device_kv.make_room(len(request.tokens) * row_bytes)
        return LayerMajorPrefill(
            self._model,
            self.store,
            self.chain(request.tokens, request.salt, request.fidelity),
            request,
            for_fidelity(self._sparse, request.fidelity),
            resume=self._resume,
            checkpoint_s=self._checkpoint_s,
            work=self._work,
            kv=self._kv,
            ranks=self._ranks,
        )

    def start_answer(self, request: AnswerRequest) -> DenseAnswer:
        """Raises ContextTooLong, InvalidRequest, KVMissing (prefill the prefix first), OutOfMemory."""
        check_sampling(request.sampling)
        if len(request.question) == 0:
            raise InvalidRequest("got an empty question, expected at least one token")
        total = len(request.prefix) + len(request.question) + request.sampling.max_tokens
        if total > self.max_positions:
            raise ContextTooLong(total, self.max_positions)
        if len(request.prefix) == 0:
            return DenseAnswer(self._model, request, None, self._decode, lambda: None, self._pool)
        self._device_kv.drop_unstored()
        chain = self.chain(request.prefix, request.salt, request.fidelity)
        prefix = self._share(chain, request)
        try:
            return DenseAnswer(
                self._model, request, prefix, self._decode, lambda: self._unshare(chain[-1].key, prefix), self._pool
            )
        except BaseException:
            self._unshare(chain[-1].key, prefix)
            raise

    def close(self) -> None:
        """End the processes of other ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.close()

    def chain(self, tokens: TokenIds, salt: bytes, fidelity: Fidelity) -> list[Segment]:
        """The keyed segments under which the KV of `tokens` is stored."""
        return segment_chain(tokens, salt=salt, digest=self.digest(fidelity))

    def _share(self, chain: list[Segment], request: AnswerRequest) -> Prefix:
        key = chain[-1].key
        prefix = self._prefixes.get(key)
        if prefix is None or prefix.lost:
            stored = self.store.match(chain)
            if stored < len(chain):
                raise KVMissing(f"KV of {stored} of {len(chain)} segments is stored: prefill the prefix first")
            prefix = self._prefixes[key] = self._device_kv.take(key) or self._open_prefix(chain, request)
        prefix.holders += 1
        return prefix

    def _open_prefix(self, chain: list[Segment], request: AnswerRequest) -> Prefix:
        settings = for_fidelity(self._sparse, request.fidelity)
        open_rows = partial(self._open_rows, settings=settings)
        source = KVSource(self.store, self._planner, request.prefix, settings, open_rows, self._model.device)
        if self._model.device.type != "cuda":
            return PrefixKV(self._model, source, chain, self._kv)
        from engine.cuda.prefix import DevicePrefix, StreamedPrefix

        needed = self._kv.layout(self._model.spec).layer_bytes(chain[-1].end) * self._model.spec.num_layers
        if self._device_kv.make_room(needed):
            return DevicePrefix(self._model, source, chain, self._kv)
        return StreamedPrefix(self._model, source, chain, self._kv)

    def _open_rows(self, chain: Sequence[Segment], settings: SparseSettings) -> PrefillRows:
        """What computes a whole prefix's segments. Raises OutOfMemory."""
        return prefill_rows(self._model, chain, 0, settings, self._work, self._kv)

    def _unshare(self, key: str, prefix: Prefix) -> None:
        prefix.holders -= 1
        if prefix.holders == 0:
            if self._prefixes.get(key) is prefix:
                del self._prefixes[key]
            self._device_kv.put(key, prefix)


def open_engine(
    folder: Path,
    open_store: Callable[[KVLayout], KVStore],
    *,
    resume_dir: Path | None = None,
    resume_bytes: int = 8 << 30,
    checkpoint_s: float = 5.0,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    sparse: SparseSettings | None = None,
    linears: str = "auto",
    kv_dtype: str = "auto",
    gpus: int = 1,
    kv_way: KVWay = "auto",
) -> LocalEngine:
    """Load the Hugging Face folder `folder` and open its KV store, whose layout the model decides.

    device: auto (a GPU where there is one), cpu, cuda or cuda:N. dtype: auto, bfloat16 or float32; auto is bfloat16
    where the processor computes in it. linears: auto (as dtype) or float8. kv_dtype: auto (as dtype), bfloat16,
    float32, float8 or int8. threads: 0 leaves PyTorch's choice. gpus: how many compute a document together, `device`
    and those behind it, each but the first in a process of its own; on a CPU so many processes. kv_way: how answers
    come by stored KV on a slow tier: load, compute, both at once, or auto.

    On a GPU every kernel is checked against its reference first; one that fails is replaced, with a log line.
    Raises ModelError, ValueError for an unknown device, dtype or way or too few GPUs, EngineError where ranks don't
    start.
    """
    place = _device(device)
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    if linears not in ("auto", "float8"):
        raise ValueError(f"linears: got {linears!r}, expected auto or float8")
    number = _dtype(dtype, place)
    kv = kv_format(kv_dtype, number)
    rates = gpu_rates(linears) if place.type == "cuda" else MachineRates()
    open_rank = partial(_open_rank, folder, number, linears == "float8")
    with ExitStack() as undo:
        ranks = RankGroup(gpus, open_rank, place) if gpus > 1 else None
        if ranks is not None:
            undo.callback(ranks.close)
        parts = open_rank(place)
        model, tokenizer = parts.model, load_tokenizer(folder)
        if place.type == "cuda":
            _compile_for_long_documents(model, sparse or default_settings("cuda"))
        if ranks is not None:
            ranks.join(parts)
        planner = KVPlanner(PrefillWork(model.spec, rates), kv.layout(model.spec), kv_way)
        store = open_store(kv.layout(model.spec))
        undo.pop_all()
    log.info(
        "engine open",
        extra={
            "model": str(folder),
            "device": str(place),
            "dtype": str(model.dtype),
            "linears": model.linear_dtype or str(model.dtype),
            "kv": str(kv.dtype),
            "threads": torch.get_num_threads(),
            "ranks": gpus,
        },
    )
    return LocalEngine(
        model,
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        store,
        resume=ResumeFolder(resume_dir, cap_bytes=resume_bytes) if resume_dir is not None else None,
        sparse=sparse,
        checkpoint_s=checkpoint_s,
        kv=kv,
        rates=rates,
        ranks=ranks,
        planner=planner,
    )


def _open_rank(folder: Path, dtype: torch.dtype, fp8_linears: bool, device: torch.device) -> RankParts:
    """What a rank computes with, or the only one. Raises ModelError."""
    model = load_model(folder, dtype=dtype, device=device, fp8_linears=fp8_linears)
    fingerprint = f"{model.weights_digest} {model.dtype} {model.linear_dtype}"
    if device.type == "cuda":
        selftest.run(device, head_dims=(model.spec.head_dim,))
        fingerprint += f" {sorted((op, path) for op, (path, _) in dispatch.paths().items())}"
    work = PrefillWork(model.spec, MachineRates())

    def open_rows(
        chain: Sequence[Segment], first: int, settings: SparseSettings, kv: KVFormat, own: Sequence[Segment]
    ) -> RowsInHalves:
        return prefill_rows(model, chain, first, settings, work, kv, own)

    return RankParts(model, open_rows, fingerprint)


def _compile_for_long_documents(model: Model, settings: SparseSettings) -> None:
    from engine.cuda.warm_up import warm_up

    try:
        with torch.inference_mode():
            warm_up(model, settings)
    except Exception as error:  # what is not compiled now is compiled when it is first needed
        log.warning("no kernels compiled ahead for long documents: %s", error)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ModelError."""
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: got {name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return torch.bfloat16 if supported is not None and supported() else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype: got {name!r}, expected auto, {' or '.join(_DTYPES)}")
    return _DTYPES[name]
