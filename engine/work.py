"""How long pieces of a prefill take, predicted from floating-point operations and a machine's rates. Torch-free."""

from dataclasses import dataclass

from engine.chain import SEGMENT_TOKENS
from engine.sparse.settings import SparseSettings
from engine.spec import ModelSpec

# Share of the causal matrix that `adaptive` keeps by target on the default model's text (loadtests/engine_cpu.py);
# the choice of blocks and the guard come on top.
_DENSITY = {0.90: 0.37, 0.95: 0.47, 0.99: 0.77}
_CHOICE_SHARE = 0.16
_TILE_FLOPS = 1.5e11
_SMALLEST_TILE = 64


@dataclass(frozen=True)
class MachineRates:
    """Sustained floating-point operations a second.

    The defaults were measured on two cores of a Xeon with AMX in bfloat16 (loadtests/engine_cpu.py).
    """

    linear_flops: float = 1.1e12
    attention_flops: float = 6.7e11


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
        spec = self.spec
        linear = 2.0 * rows * spec.linear_parameters / spec.num_layers
        pairs = rows * start + rows * rows / 2
        attention = 4.0 * spec.heads * spec.head_dim * pairs * self._density(start + rows, settings)
        return linear / self.rates.linear_flops + attention / self.rates.attention_flops

    def layer_s(self, first: int, last: int, settings: SparseSettings, *, segment: int) -> float:
        """Rows [first, last) through one layer, segment by segment."""
        starts = range(first, last, segment)
        return sum(self.segment_s(start, min(segment, last - start), settings) for start in starts)

    @staticmethod
    def _density(end: int, settings: SparseSettings) -> float:
        if settings.policy == "dense" or end <= settings.crossover_tokens:
            return 1.0
        nearest = min(_DENSITY, key=lambda target: abs(target - settings.target))
        return min(_DENSITY[nearest] + _CHOICE_SHARE, 1.0)
