"""Deficit round-robin over tenants (Shreedhar and Varghese, SIGCOMM 1995), one job at a time and without the loop.

Tenants stand on a ring. Each visit gives a tenant QUANTUM tokens of credit; a tenant whose credit covers its first
job's cost is served and stays the current one until its credit runs out. Who would be served next after how many
visits is computed directly, so costs may be as far apart as a question and a million tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

QUANTUM = 1024  # tokens; also the least cost of a job, so that free jobs can't be served without end


@dataclass(frozen=True)
class Choice:
    tenant: str
    deficits: Mapping[str, int]  # credit left, of the waiting tenants; others' is forgotten


def choose(costs: Mapping[str, int], deficits: Mapping[str, int], current: str | None) -> Choice:
    """Pick among tenants by the cost (tokens) of each one's first job.

    `deficits` and `current` are what the choice before left behind. Raises ValueError when nobody waits.
    """
    if not costs:
        raise ValueError("no tenant has a job waiting; expected at least one")
    needs = {tenant: max(cost, QUANTUM) for tenant, cost in costs.items()}
    credit = {tenant: deficits.get(tenant, 0) for tenant in needs}
    if current in needs and credit[current] >= needs[current]:
        return _serve(current, needs, credit)

    names = sorted(needs)
    behind = [name for name in names if current is None or name > current]
    ring = behind + names[: len(names) - len(behind)]  # the current tenant comes last
    visits = {name: max(1, -(-(needs[name] - credit[name]) // QUANTUM)) for name in ring}
    rounds, position = min((visits[name], position) for position, name in enumerate(ring))
    for place, name in enumerate(ring):
        credit[name] += QUANTUM * (rounds if place <= position else rounds - 1)
    return _serve(ring[position], needs, credit)


def _serve(tenant: str, needs: Mapping[str, int], credit: dict[str, int]) -> Choice:
    credit[tenant] -= needs[tenant]
    return Choice(tenant, credit)
