"""How much of a prefix is computed beside loading the rest: by learnt rates, checked against what both would take."""

import itertools

import numpy as np
import pytest

from engine.chain import Segment, segment_chain
from engine.interfaces import KVLayout
from engine.kv_plan import KVPlan, KVPlanner, KVWay
from engine.sparse.settings import SparseSettings
from engine.spec import spec_from_config
from engine.work import MachineRates, PrefillWork
from tests.engine.tiny_models import SHAPE

SPEC = spec_from_config(SHAPE | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"})
LAYOUT = KVLayout(num_layers=3, bytes_per_token=1024, layers_per_group=1)
DENSE = SparseSettings(policy="dense")
CHAIN = segment_chain(np.arange(40 * 4096 + 77, dtype=np.uint32), salt=b"", digest="")
WORK = PrefillWork(SPEC, MachineRates())


def compute_s(chain: list[Segment]) -> float:
    return 3 * sum(WORK.segment_s(each.start, each.num_tokens, DENSE) for each in chain)


def size_bytes(chain: list[Segment]) -> int:
    return 3 * sum(LAYOUT.layer_bytes(each.num_tokens) for each in chain)


def planner(load_s: float | None, way: KVWay = "auto") -> KVPlanner:
    """One that has learnt that all of CHAIN takes `load_s` from the disk."""
    made = KVPlanner(WORK, LAYOUT, way)
    if load_s is not None:
        made.loaded("disk", size_bytes(CHAIN), load_s)
    return made


def plan(load_s: float | None, way: KVWay = "auto", tier: str = "disk") -> KVPlan:
    return planner(load_s, way).plan(CHAIN, DENSE, tier)


def test_both_end_together_where_they_take_about_as_long() -> None:
    whole_s = compute_s(CHAIN)
    found = plan(whole_s)
    assert 0 < found.segments < len(CHAIN)
    assert found.load_s is not None
    assert found.compute_s == pytest.approx(compute_s(CHAIN[: found.segments]))
    assert found.load_s == pytest.approx(whole_s * size_bytes(CHAIN[found.segments :]) / size_bytes(CHAIN))
    # Early tokens are cheap: more than half of them are computed in less than 0.7 of the time either would take.
    assert found.segments > len(CHAIN) / 2
    assert max(found.load_s, found.compute_s) <= 0.7 * whole_s


def test_the_cheapest_cut_is_found() -> None:
    for factor in (0.2, 0.5, 1.0, 3.0):
        whole_s = factor * compute_s(CHAIN)
        found = plan(whole_s)

        def cost_s(count: int, whole_s: float = whole_s) -> float:
            load_s = whole_s * size_bytes(CHAIN[count:]) / size_bytes(CHAIN)
            return max(load_s, compute_s(CHAIN[:count])) + 0.2 * compute_s(CHAIN[:count])

        assert cost_s(found.segments) == pytest.approx(min(map(cost_s, range(len(CHAIN) + 1))))


def test_what_is_much_faster_is_done_alone() -> None:
    whole_s = compute_s(CHAIN)
    assert plan(whole_s / 1000).segments == 0
    assert plan(whole_s * 1e6).segments == len(CHAIN)


def test_nothing_is_computed_for_host_memory_or_without_a_rate() -> None:
    for way in ("auto", "load", "compute", "both"):
        assert plan(1e9, way, tier="host").segments == 0  # type: ignore[arg-type]
    assert plan(None).segments == 0
    small = KVPlanner(WORK, LAYOUT)
    small.loaded("disk", 1000, 1e9)
    assert small.plan(CHAIN, DENSE, "disk").segments == 0, "a small read says nothing of the rate"


def test_ways_can_be_forced() -> None:
    assert plan(1e-9, "compute").segments == len(CHAIN)
    assert plan(1e9, "load").segments == 0
    assert 0 < plan(1e-9, "both").segments < len(CHAIN)
    assert 0 < plan(1e9, "both").segments < len(CHAIN)
    assert 0 < plan(None, "both").segments < len(CHAIN)
    assert planner(1.0, "both").plan(CHAIN[:1], DENSE, "disk").segments == 0, "one segment can't be cut"
    with pytest.raises(ValueError, match="got 'neither', expected auto"):
        plan(1.0, "neither")  # type: ignore[arg-type]


def test_the_machines_slowness_is_learnt() -> None:
    learning, counts = planner(compute_s(CHAIN)), []
    for _ in range(6):
        counts.append(learning.plan(CHAIN, DENSE, "disk").segments)
        front = CHAIN[: max(counts[-1], 1)]
        learning.computed(front, DENSE, 4 * compute_s(front))
    assert all(later <= earlier for earlier, later in itertools.pairwise(counts))
    assert counts[-1] < counts[0]
    exact = KVPlanner(PrefillWork(SPEC, MachineRates(1.1e12 / 4, 6.7e11 / 4)), LAYOUT)
    exact.loaded("disk", size_bytes(CHAIN), compute_s(CHAIN))
    assert abs(counts[-1] - exact.plan(CHAIN, DENSE, "disk").segments) <= 1
