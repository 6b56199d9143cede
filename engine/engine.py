"""The engine on the CPU: opens a model, starts prefills and answers on one KV store."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.answer import DenseAnswer
from engine.chain import Segment, TokenIds, segment_chain
from engine.digest import EngineDigest
from engine.errors import ContextTooLong, InvalidRequest, KVMissing, ModelError
from engine.interfaces import AnswerRequest, Fidelity, KVLayout, KVStore, PrefillRequest
from engine.kv_store import layout_for
from engine.model import Model, load_model
from engine.prefill import LayerMajorPrefill
from engine.prefix_kv import PrefixKV
from engine.resume import ResumeFolder
from engine.sampling import check_sampling
from engine.sparse.settings import SparseSettings, for_fidelity
from engine.threads import keep_freed_memory
from engine.work import MachineRates, PrefillWork

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class LocalEngine:
    """`Engine` of engine.interfaces on one machine's CPU."""

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
    ) -> None:
        """Raises ModelError where a head config is another model's."""
        self._model, self._decode, self.store = model, decode, store
        self._resume, self._checkpoint_s = resume, checkpoint_s
        self._sparse = sparse or SparseSettings()
        if self._sparse.head_config is not None:
            self._sparse.head_config.check(num_layers=model.spec.num_layers, heads=model.spec.heads)
        self._work = PrefillWork(model.spec, rates or MachineRates())
        self._prefixes: dict[str, PrefixKV] = {}  # by the last segment's key, while answers hold them
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
            linear_dtype=str(model.dtype),
            kv_format=str(model.dtype),
            numerics=model.device.type,
            sparse=for_fidelity(self._sparse, fidelity),
        ).hex

    def cached_tokens(self, tokens: TokenIds, *, salt: bytes, fidelity: Fidelity) -> int:
        chain = self.chain(tokens, salt, fidelity)
        stored = self.store.match(chain)
        return chain[stored - 1].end if stored else 0

    def start_prefill(self, request: PrefillRequest) -> LayerMajorPrefill:
        """Raises ContextTooLong, InvalidRequest for an empty prefix, StorageFull."""
        if len(request.tokens) == 0:
            raise InvalidRequest("got an empty prefix, expected at least one token")
        if len(request.tokens) > self.max_positions:
            raise ContextTooLong(len(request.tokens), self.max_positions)
        return LayerMajorPrefill(
            self._model,
            self.store,
            self.chain(request.tokens, request.salt, request.fidelity),
            request,
            for_fidelity(self._sparse, request.fidelity),
            resume=self._resume,
            checkpoint_s=self._checkpoint_s,
            work=self._work,
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
            return DenseAnswer(self._model, request, None, self._decode, lambda: None)
        chain = self.chain(request.prefix, request.salt, request.fidelity)
        prefix = self._share(chain)
        try:
            return DenseAnswer(self._model, request, prefix, self._decode, lambda: self._unshare(chain[-1].key, prefix))
        except BaseException:
            self._unshare(chain[-1].key, prefix)
            raise

    def chain(self, tokens: TokenIds, salt: bytes, fidelity: Fidelity) -> list[Segment]:
        """The keyed segments under which the KV of `tokens` is stored."""
        return segment_chain(tokens, salt=salt, digest=self.digest(fidelity))

    def _share(self, chain: list[Segment]) -> PrefixKV:
        key = chain[-1].key
        prefix = self._prefixes.get(key)
        if prefix is None or prefix.lost:
            stored = self.store.match(chain)
            if stored < len(chain):
                raise KVMissing(f"KV of {stored} of {len(chain)} segments is stored: prefill the prefix first")
            prefix = self._prefixes[key] = PrefixKV(self._model, self.store, chain)
        prefix.holders += 1
        return prefix

    def _unshare(self, key: str, prefix: PrefixKV) -> None:
        prefix.holders -= 1
        if prefix.holders == 0:
            prefix.close()
            if self._prefixes.get(key) is prefix:
                del self._prefixes[key]


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
) -> LocalEngine:
    """Load the Hugging Face folder `folder` and open its KV store, whose layout the model decides.

    device: auto or cpu. dtype: auto, bfloat16 or float32; auto is bfloat16 where the processor computes in it.
    threads: 0 leaves PyTorch's choice. Raises ModelError, ValueError for an unknown device or dtype.
    """
    if device not in ("auto", "cpu"):
        raise ValueError(f"device: got {device!r}, expected auto or cpu")
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    model = load_model(folder, dtype=_dtype(dtype))
    tokenizer = load_tokenizer(folder)
    spec = model.spec
    store = open_store(layout_for(spec.num_layers, spec.kv_bytes_per_token(model.dtype.itemsize)))
    log.info("engine open", extra={"model": str(folder), "dtype": str(model.dtype), "threads": torch.get_num_threads()})
    return LocalEngine(
        model,
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
        store,
        resume=ResumeFolder(resume_dir, cap_bytes=resume_bytes) if resume_dir is not None else None,
        sparse=sparse,
        checkpoint_s=checkpoint_s,
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises ModelError."""
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return torch.bfloat16 if supported is not None and supported() else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype: got {name!r}, expected auto, {' or '.join(_DTYPES)}")
    return _DTYPES[name]
