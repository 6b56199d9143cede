"""The contracts between the engine's parts, and between the engine and those who call it. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.chain import Segment, TokenIds

SCALE_TOKENS = 128  # tokens that share a scale of quantised KV
Fidelity = Literal["default", "strict", "fast", "exact"]
CacheState = Literal["cold", "partial", "warm_device", "warm_host", "warm_disk", "warm_shared"]


# --- KV store: who keeps the bytes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class KVLayout:
    """How one model's KV lies in bytes. One (segment, layer) is K then V, each [kv_heads, tokens, head_dim], then the
    scales of K and V, each [kv_heads, ceil(tokens / 128)], where KV is quantised."""

    num_layers: int
    bytes_per_token: int  # of one layer, K and V together
    layers_per_group: int  # one file holds one segment's layers of one group
    scale_bytes: int = 0  # of one layer and 128 tokens, K and V together

    @property
    def num_groups(self) -> int:
        return -(-self.num_layers // self.layers_per_group)

    def layer_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.bytes_per_token + -(-num_tokens // SCALE_TOKENS) * self.scale_bytes


class KVReader(Protocol):
    """Reads leased segments layer by layer; the next layer's bytes are fetched while the caller computes."""

    tier: Literal["host", "disk", "shared"]  # the slowest tier that a segment of this reader came from

    def read_layer(self, layer: int) -> Sequence[memoryview]:
        """One buffer a segment, in chain order, checksum verified. Raises KVMissing (a corrupt block is a miss)."""
        ...

    def close(self) -> None:
        """Ends the lease."""
        ...


class KVWriter(Protocol):
    """Writes a run of segments layer by layer; nothing can be matched until `commit`."""

    def write_layer(self, layer: int, segment: int, data: memoryview) -> None:
        """`segment` indexes the writer's own segments. Returns once the bytes are copied; disk work is behind."""
        ...

    def groups_done(self) -> int:
        """Layer groups (counted from 0) that are published for every segment: a resume may start behind them."""
        ...

    def flush(self) -> None:
        """Wait until everything handed over is on disk. Raises StorageFull or OSError of the writing thread."""
        ...

    def commit(self) -> None: ...

    def suspend(self) -> None:
        """Stop, keep published groups for a later resume by the same owner."""
        ...

    def abort(self) -> None:
        """Stop and remove what was written."""
        ...


class KVStore(Protocol):
    layout: KVLayout

    def match(self, chain: Sequence[Segment]) -> int:
        """Number of leading segments that are stored completely."""
        ...

    def open_reader(self, chain: Sequence[Segment]) -> KVReader:
        """Lease `chain` (all of it must be stored). Raises KVMissing."""
        ...

    def open_writer(self, chain: Sequence[Segment], *, first: int, owner: str) -> KVWriter:
        """Write `chain[first:]`. Room is reserved under the cap, evicting by LRU, before a byte is written.

        `owner` names the work (a job id): opened again by the same owner after a crash, published groups count.
        Raises StorageFull.
        """
        ...

    def attach(self, chain: Sequence[Segment], holder: str, *, ttl_s: float | None, pinned: bool) -> None:
        """Record that `holder` (a document's prefill) uses these stored segments; sets the holder's TTL and pin.

        A segment is pinned while any of its holders is, and lives as long as the longest TTL (None: no limit).
        """
        ...

    def set_policy(self, holder: str, *, ttl_s: float | None, pinned: bool) -> None: ...

    def release(self, holder: str) -> int:
        """The holder is gone: remove segments that nobody else holds. Returns the bytes freed."""
        ...


# --- Work: what the engine is asked to do ----------------------------------------------------------------------


@dataclass(frozen=True)
class PrefillRequest:
    """Make sure the KV of `tokens` is stored. Shared leading segments are taken from the store."""

    tokens: TokenIds  # [tokens] the whole cacheable prefix: template head, documents
    salt: bytes
    owner: str  # job id: names the resume file and the writer
    holder: str  # the document's prefill that will hold the KV
    fidelity: Fidelity = "default"
    kv_ttl_s: float | None = None
    pinned: bool = False


@dataclass(frozen=True)
class RecallReport:
    """The fidelity guard's verdict: softmax mass kept, 0–1, over (layer, segment, KV-head group) cells left sparse.

    Estimated from witness rows, drawn apart from those that made the choice; each cell is an estimate with its own
    sampling error, so `p5` and `worst` are a little too low rather than too high.
    """

    target: float
    mean: float
    p5: float
    worst: float
    below_target: bool


@dataclass(frozen=True)
class SegmentRecall:
    """What one segment's attention kept, over layers and KV-head groups. Tokens [start, end) of the whole prefix."""

    start: int
    end: int
    density: float  # causal pairs kept / all of them
    mean: float | None  # recall of the cells left sparse; None where all were dense, which loses nothing
    worst: float | None


@dataclass(frozen=True)
class PrefillResult:
    num_tokens: int
    cached_tokens: int  # taken from the store
    layers_recomputed: int  # layers computed again by this attempt after a resume, 0 without one
    resumed_from_layer: int
    density: float  # causal pairs kept / all causal pairs, mean over layers and groups
    recall: RecallReport | None  # None where everything was dense
    heads: Mapping[str, int]  # pattern → number of KV-head groups: dense, a_shape, vertical_slash, block_sparse
    seconds: float
    segments: Sequence[Segment] = field(default_factory=list)
    segment_recalls: Sequence[SegmentRecall] = ()  # of what was computed, not taken from the store
    # A string a layer with a letter a KV-head group: d, a, v, b as in `heads`; () where nothing was computed
    head_map: Sequence[str] = ()


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0  # over generated tokens only
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnswerRequest:
    """Answer from a prefix whose KV is stored; the rest of the prompt attends densely to all of it."""

    prefix: TokenIds  # may be empty
    question: TokenIds  # at least one token
    salt: bytes
    sampling: SamplingParams
    fidelity: Fidelity = "default"


@dataclass(frozen=True)
class AnswerDelta:
    """What one step of an answer gave. `finish_reason` ends it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"] | None = None


class Prefill(Protocol):
    """A prefill in steps, so that its worker can do other work, renew its lease and notice a cancel between them."""

    def step(self) -> bool:
        """Do one bounded piece of work; True while there is more."""
        ...

    @property
    def progress(self) -> float:
        """0–1, by predicted time."""
        ...

    @property
    def eta_s(self) -> float | None: ...

    @property
    def result(self) -> PrefillResult:
        """Only after `step` returned False."""
        ...

    def suspend(self) -> None:
        """Checkpoint and let go of everything; the same owner can go on later, in another process."""
        ...

    def cancel(self) -> None:
        """Drop the work and its files."""
        ...


class Answer(Protocol):
    """An answer in steps: the first computes the question's rows, each further one a token."""

    def step(self) -> AnswerDelta: ...

    @property
    def kv_tier(self) -> CacheState: ...

    @property
    def computed_tokens(self) -> int:
        """Leading tokens of the prefix that were computed again because that was faster than loading all of them."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    def close(self) -> None:
        """Free the KV lease; safe to call twice, at any time."""
        ...


class Engine(Protocol):
    """Tokens in, KV and tokens out."""

    max_positions: int

    def digest(self, fidelity: Fidelity) -> str:
        """Hex; everything besides tokens and salt that KV made under `fidelity` depends on."""
        ...

    def cached_tokens(self, tokens: TokenIds, *, salt: bytes, fidelity: Fidelity) -> int:
        """Leading tokens of `tokens` whose KV is stored."""
        ...

    def start_prefill(self, request: PrefillRequest) -> Prefill:
        """Raises ContextTooLong, StorageFull."""
        ...

    def start_answer(self, request: AnswerRequest) -> Answer:
        """Raises ContextTooLong, KVMissing (prefill the prefix first)."""
        ...
