"""What the sparse policy may be told, and what each fidelity makes of it. Torch-free."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from engine.interfaces import Fidelity
from engine.sparse.head_config import HeadConfig, load_head_config

Policy = Literal["dense", "a_shape", "vertical_slash", "block_sparse", "adaptive"]
POLICIES: tuple[Policy, ...] = ("dense", "a_shape", "vertical_slash", "block_sparse", "adaptive")

# Raised whenever the choice of blocks changes for equal settings.
POLICY_VERSION = 6
_LARGEST_ROW_BLOCK = 512
_LEAST_GUARD_ROWS = 4


@dataclass(frozen=True)
class SparseSettings:
    """One policy with its constants; all of them are part of the engine digest. Tokens are key positions."""

    policy: Policy = "adaptive"
    target: float = 0.95  # mean share of the softmax mass to keep, per (segment, KV-head group)
    dense_below_target: bool = False  # past the widening budget: go dense instead of saying below_target
    crossover_tokens: int = 8192  # segments that end at or before this position are dense
    row_block: int = 256
    key_block: int = 64
    sampled_rows: int = 8  # of each row block and head, exact, for the choice of blocks
    # A GPU's sampling stays linear in the length: from this position on half as many rows, from its double a quarter, …
    # at least 1; where that isn't enough, row blocks grow.
    sampled_rows_until: int | None = None
    guard_rows: int = 64  # of each segment and head, fresh, for the measured recall
    sink_blocks: int = 1
    local_blocks: int = 4
    corrections: int = 3  # the budget: how often the guard may enlarge or narrow the choice
    dense_share: float = 0.85  # a segment whose choice keeps more than this share is cheaper dense
    # The fixed policies; a head config replaces them head by head.
    a_shape_sink: int = 128
    a_shape_local: int = 4096
    vertical_tokens: int = 1000
    slash_tokens: int = 6096
    top_blocks: int = 100
    head_config: HeadConfig | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where a head config would not be heard."""
        if self.head_config is not None and self.policy in ("dense", "adaptive"):
            raise ValueError(f"a head config sets fixed budgets: got policy {self.policy}, expected one that has them")

    def sampled_rows_at(self, end: int) -> int:
        """Rows of each row block and head that a segment ending at position `end` samples for its choice."""
        count, until = self.sampled_rows, self.sampled_rows_until
        while until is not None and end > until and count > 1:
            count, until = count // 2, until * 2
        return count

    def guard_rows_at(self, end: int) -> int:
        """Fresh rows of each head in a segment that ends at `end`: fewer where each costs more, at least 4."""
        return max(_LEAST_GUARD_ROWS, self.guard_rows * self.sampled_rows_at(end) // self.sampled_rows)

    def row_block_at(self, end: int) -> int:
        """Rows that share a list where `sampled_rows_until` is set: twice as many each time the position quadruples."""
        block, until = self.row_block, None
        if self.sampled_rows_until is not None:  # where one row of each block is left
            until = self.sampled_rows * self.sampled_rows_until // 2
        while until is not None and end > until and block < _LARGEST_ROW_BLOCK:
            block, until = block * 2, until * 4
        return block

    def canonical(self) -> str:
        """One line that is equal exactly when KV is."""
        values = {name: value for name, value in asdict(self).items() if name != "head_config"}
        if self.policy == "dense":
            values = {"policy": "dense"}
        elif self.head_config is not None:
            values["head_config"] = self.head_config.digest
        return f"policy {POLICY_VERSION} " + " ".join(f"{name}={values[name]}" for name in sorted(values))


def default_settings(device_type: str) -> SparseSettings:
    """What suits a cpu or cuda device: a GPU's kernels like larger key blocks, and its speed makes rows dear."""
    if device_type != "cuda":
        return SparseSettings()
    return SparseSettings(
        key_block=128,
        local_blocks=2,
        row_block=128,
        sampled_rows=16,
        sampled_rows_until=32_768,
        guard_rows=32,
        corrections=1,
    )


def chosen_settings(
    policy: str | None = None, head_config: str | Path | None = None, *, device_type: str = "cpu", **constants: Any
) -> SparseSettings:
    """The settings of a policy, or of the head config in a file, on a cpu or cuda device.

    `constants` are fields of SparseSettings in place of the device's defaults. Raises ValueError: an unknown policy or
    constant, a policy beside a head config (which names every head's pattern). Raises ModelError: the file is not a
    head config.
    """
    known = {field.name for field in fields(SparseSettings)}
    if unknown := sorted(constants.keys() - known):
        raise ValueError(f"unknown option {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    chosen = replace(default_settings(device_type), **constants)
    if head_config is not None:
        if policy is not None:
            raise ValueError(f"a head config names each head's pattern: got policy {policy!r} beside {head_config}")
        # Which of the fixed policies it is says nothing: the file decides for every head.
        config = load_head_config(Path(head_config).expanduser())
        return replace(chosen, policy="vertical_slash", head_config=config)
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}")
    return replace(chosen, policy=policy or "adaptive")


_TARGETS: dict[Fidelity, float] = {"strict": 0.99, "fast": 0.90}


def for_fidelity(settings: SparseSettings, fidelity: Fidelity) -> SparseSettings:
    """`default` is the settings as they are; `strict` and `fast` change the target; `exact` is dense."""
    if fidelity == "exact":
        return SparseSettings(policy="dense")
    if fidelity == "default":
        return settings
    return replace(settings, target=_TARGETS[fidelity], dense_below_target=fidelity == "strict")
