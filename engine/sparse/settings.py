"""What the sparse policy may be told, and what each fidelity makes of it. Torch-free."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from engine.interfaces import Fidelity
from engine.sparse.head_config import HeadConfig

Policy = Literal["dense", "a_shape", "vertical_slash", "block_sparse", "adaptive"]
POLICIES: tuple[Policy, ...] = ("dense", "a_shape", "vertical_slash", "block_sparse", "adaptive")

# Raised whenever the choice of blocks changes for equal settings.
POLICY_VERSION = 5


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

    def canonical(self) -> str:
        """One line that is equal exactly when KV is."""
        fields = {name: value for name, value in asdict(self).items() if name != "head_config"}
        if self.policy == "dense":
            fields = {"policy": "dense"}
        elif self.head_config is not None:
            fields["head_config"] = self.head_config.digest
        return f"policy {POLICY_VERSION} " + " ".join(f"{name}={fields[name]}" for name in sorted(fields))


_TARGETS: dict[Fidelity, float] = {"strict": 0.99, "fast": 0.90}


def for_fidelity(settings: SparseSettings, fidelity: Fidelity) -> SparseSettings:
    """`default` is the settings as they are; `strict` and `fast` change the target; `exact` is dense."""
    if fidelity == "exact":
        return SparseSettings(policy="dense")
    if fidelity == "default":
        return settings
    return replace(settings, target=_TARGETS[fidelity], dense_below_target=fidelity == "strict")
