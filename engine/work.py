"""How long pieces of a prefill take, predicted from floating-point operations and a machine's rates. Torch-free."""

from dataclasses import dataclass

from engine.chain import SEGMENT_TOKENS
from engine.sparse.settings import SparseSettings
from engine.spec import ModelSpec

# Share of the causal matrix that `adaptive` keeps by target on the default model's text (loadtests/engine_cpu.py);
# the choice of blocks and the guard come on top.
_DENSITY = {0.90: 0.37, 0.95: 0.47, 0.99: 0.77}
_CHOICE_SHARE = 0.16
# Small models spread their attention; of larger ones (head size 128 and up) a row is taken to need so many keys,
# whatever the length (loadtests/heads.py, profile llama8b; 8B models are published at less).
_LARGE_HEAD = 128
_KEPT_KEYS = {0.90: 6_000, 0.95: 8_800, 0.99: 20_000}
_TILE_FLOPS = 1.5e11
_SMALLEST_TILE = 64


@dataclass(frozen=True)
class MachineRates:
    """Sustained rates: floating-point operations and bytes a second.

    The defaults were measured on two cores of a Xeon with AMX in bfloat16 (loadtests/engine_cpu.py), where the choice
    of blocks counts as a share of the attention and element-wise work with the linears.
    """

    linear_flops: float = 1.1e12
    attention_flops: float = 6.7e11
    dense_flops: float | None = None  # of attention that leaves nothing out; None: as any other
    scoring_flops: float | None = None  # of the choice and the guard; None: a share of the attention
    elementwise_bytes: float | None = None  # of norms, rotations and activations; None: not counted


def gpu_rates(linears: str = "auto") -> MachineRates:
    """Of one H200 at its sustained clocks (loadtests/engine_gpu.py); `linears` auto is bfloat16, or float8."""
    linear_flops = 1.45e15 if linears == "float8" else 7.3e14
    return MachineRates(linear_flops, 5.2e14, dense_flops=6.4e14, scoring_flops=3.3e14, elementwise_bytes=1.6e12)


@dataclass(frozen=True)
class PrefillWork:
    """Predicted seconds of one layer's segments."""

    spec: ModelSpec
    rates: MachineRates

    @property
    def tile_rows(self) -> int:
        """Rows that go through the linears together: a segment, or what 0.1 s allows of it on the machine measured.

        From the model alone, so that the bits of the KV do not depend on the machine's measured rates.
        """
        rows, row_flops = SEGMENT_TOKENS, 2.0 * self.spec.linear_parameters / self.spec.num_layers
        while rows > _SMALLEST_TILE and rows * row_flops > _TILE_FLOPS:
            rows //= 2
        return rows

    def segment_s(self, start: int, rows: int, settings: SparseSettings) -> float:
        """Rows [start, start + rows) through one layer."""
        spec, rates, end = self.spec, self.rates, start + rows
        linear = 2.0 * rows * spec.linear_parameters / spec.num_layers
        pair_flops = 4.0 * spec.heads * spec.head_dim * (rows * start + rows * rows / 2)
        sparse = self._sparse(end, settings)
        attention_flops = rates.attention_flops if sparse else rates.dense_flops or rates.attention_flops
        seconds = linear / rates.linear_flops + pair_flops * self._density(end, settings) / attention_flops
        if rates.scoring_flops is not None and sparse:
            sampled = settings.sampled_rows_at(end) / settings.row_block_at(end)
            guarded = 2 * settings.guard_rows_at(end) / SEGMENT_TOKENS
            seconds += pair_flops / 2 * (sampled + guarded) / rates.scoring_flops
        if rates.elementwise_bytes is not None:
            numbers = 6 * spec.hidden + 4 * spec.heads * spec.head_dim + 3 * spec.intermediate
            seconds += 2.0 * rows * numbers / rates.elementwise_bytes
        return seconds

    def layer_s(self, first: int, last: int, settings: SparseSettings, *, segment: int) -> float:
        """Rows [first, last) through one layer, segment by segment."""
        starts = range(first, last, segment)
        return sum(self.segment_s(start, min(segment, last - start), settings) for start in starts)

    @staticmethod
    def _sparse(end: int, settings: SparseSettings) -> bool:
        return settings.policy != "dense" and end > settings.crossover_tokens

    def _density(self, end: int, settings: SparseSettings) -> float:
        """Of the work that attention does, the choice of blocks counted in where it has no rate of its own."""
        if not self._sparse(end, settings):
            return 1.0
        nearest = min(_DENSITY, key=lambda target: abs(target - settings.target))
        if self.spec.head_dim >= _LARGE_HEAD:
            return min(_KEPT_KEYS[nearest] / end, 1.0)
        return min(_DENSITY[nearest] + (_CHOICE_SHARE if self.rates.scoring_flops is None else 0.0), 1.0)
