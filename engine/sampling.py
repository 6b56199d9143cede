"""From logits to the next token: greedy, temperature, top-k, top-p, repetition penalty, seed."""

import torch

from engine.errors import InvalidRequest
from engine.interfaces import SamplingParams


def check_sampling(params: SamplingParams) -> None:
    """Raises InvalidRequest with what was got and what is allowed."""
    limits = (
        ("temperature", params.temperature >= 0, "at least 0"),
        ("top_p", 0 < params.top_p <= 1, "in (0, 1]"),
        ("top_k", params.top_k >= 0, "at least 0 (0: no limit)"),
        ("repetition_penalty", params.repetition_penalty > 0, "above 0"),
        ("max_tokens", params.max_tokens >= 1, "at least 1"),
        ("stop", all(params.stop), "non-empty strings"),
    )
    for name, fine, expected in limits:
        if not fine:
            raise InvalidRequest(f"{name}: got {getattr(params, name)!r}, expected {expected}")


class Sampler:
    """Picks one answer's tokens; with a seed the same logits give the same tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = torch.Generator()
        if params.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.seed % 2**63)
        self._generated: list[int] = []

    def pick(self, logits: torch.Tensor) -> int:
        """logits [vocabulary] float32 → a token id, remembered for the repetition penalty."""
        logits = self._penalised(logits)
        token = int(logits.argmax()) if self._params.temperature == 0 else self._draw(logits)
        self._generated.append(token)
        return token

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Keskar et al. 2019 (CTRL), over generated tokens only."""
        penalty = self._params.repetition_penalty
        if penalty == 1.0 or not self._generated:
            return logits
        seen = torch.tensor(sorted(set(self._generated)))
        values = logits[seen]
        return logits.index_put((seen,), torch.where(values > 0, values / penalty, values * penalty))

    def _draw(self, logits: torch.Tensor) -> int:
        params = self._params
        ordered, tokens = (logits / params.temperature).sort(descending=True)
        if params.top_k:
            ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
        shares = ordered.softmax(0)
        # A token stays while the mass before it is below top_p, so the first one always does.
        shares = shares.masked_fill(shares.cumsum(0) - shares >= params.top_p, 0)
        return int(tokens[torch.multinomial(shares, 1, generator=self._random)])
