"""Attention heads with realistic structure: queries and keys whose softmax mass lies where real heads put it.

Five kinds of mass are planted before RoPE and turned by it, as in a model: a *sink* (the first tokens), *local* mass
and *slashes* (a direction that queries and keys share in the quick channel pairs, so that their product depends on the
distance), *verticals* (single keys that everybody sees) and *topics* (scattered runs of 128 keys that a run of queries
looks for). Sinks, verticals and topics live in the slowest pairs, which turn little over a million positions.
Parameters stand in `heads.json` and are frozen: figures measured on them stay comparable.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PARAMETERS = Path(__file__).with_name("heads.json")
_KEY_RUN, _QUERY_RUN, _EPOCH = 128, 256, 65_536  # tokens of a topic run, of a query's interest, of a set of topics
_CODE = 8.0  # norm of every planted key direction
# Channel pairs of 64, quick to slow. Sink and verticals have a pair of their own: codes of topics overlap a little.
_SLASH_PAIRS, _LOCAL_PAIRS, _TOPIC_PAIRS = slice(0, 16), slice(16, 42), slice(42, 62)
_SINK_PAIR, _VERTICAL_PAIR = 62, 63
_SINK_TOKENS, _VERTICALS = 4, 48
_ROWS = 65_536


@dataclass(frozen=True)
class Group:
    """One KV head's group: how many keys hold its topics' mass, and how the mass is divided."""

    keys: int | None  # a row, whatever its position
    share: float | None  # of the row's past
    mass: dict[str, float]


@dataclass(frozen=True)
class Profile:
    rope_theta: float
    head_dim: int
    kv_heads: int
    group: int
    key_noise: float
    query_noise: float
    layers: tuple[tuple[Group, ...], ...]
    background: tuple[tuple[int, float], ...]  # (tokens, share), ascending

    def background_at(self, tokens: int) -> float:
        """The calibrated share at a length, interpolated between the lengths of the file in both logarithms."""
        below = [pair for pair in self.background if pair[0] <= tokens] or [self.background[0]]
        above = [pair for pair in self.background if pair[0] >= tokens] or [self.background[-1]]
        (left, low), (right, high) = below[-1], above[0]
        if left == right:
            return low
        part = math.log(tokens / left) / math.log(right / left)
        return math.exp(math.log(low) * (1 - part) + math.log(high) * part)


def load_profile(name: str) -> Profile:
    """The named profile of heads.json. Raises ValueError for an unknown name."""
    parameters = json.loads(PARAMETERS.read_text())
    if name not in parameters["profiles"]:
        raise ValueError(f"unknown heads profile {name!r}; expected one of {', '.join(parameters['profiles'])}")
    profile = parameters["profiles"][name]
    kv_heads = parameters["kv_heads"]

    def groups(layer: dict[str, Any]) -> tuple[Group, ...]:
        listed = layer.get("groups") or [{"share": layer["share"], "mass": profile["mass"]}] * kv_heads
        return tuple(Group(group.get("keys"), group.get("share"), group["mass"]) for group in listed)

    background = tuple((int(tokens), share) for tokens, share in profile["background"].items())
    shared = {
        key: parameters[key] for key in ("rope_theta", "head_dim", "kv_heads", "group", "key_noise", "query_noise")
    }
    return Profile(**shared, layers=tuple(groups(layer) for layer in profile["layers"]), background=background)


def generate(
    profile: Profile,
    tokens: int,
    *,
    layer: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, int] | None = None,
    background: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [rows, heads, head_dim], k [kv_heads, tokens, head_dim]) after RoPE; `rows` (default: all) are first and end.

    `background` overrides the profile's calibrated share of the mass that lies outside what is planted. The same
    arguments give the same values on one kind of device.
    """
    groups = profile.layers[layer % len(profile.layers)]
    first_row, end_row = rows or (0, tokens)
    if background is None:
        background = profile.background_at(tokens)
    q = torch.empty(end_row - first_row, profile.kv_heads * profile.group, profile.head_dim, dtype=dtype, device=device)
    k = torch.empty(profile.kv_heads, tokens, profile.head_dim, dtype=dtype, device=device)
    for index, group in enumerate(groups):
        planted = _Planted(profile, group, tokens, background, seed=1000 * layer + index, device=torch.device(device))
        for start in range(0, tokens, _ROWS):
            k[index, start : start + _ROWS] = planted.keys(start, min(start + _ROWS, tokens)).to(dtype)
        heads = slice(index * profile.group, (index + 1) * profile.group)
        for start in range(first_row, end_row, _ROWS):
            end = min(start + _ROWS, end_row)
            q[start - first_row : end - first_row, heads] = planted.queries(start, end).to(dtype)
    return q, k


class _Planted:
    """The planted directions of one group and who carries them."""

    def __init__(
        self, profile: Profile, group: Group, tokens: int, background: float, *, seed: int, device: torch.device
    ) -> None:
        self.profile, self.device = profile, device
        self.noise = torch.Generator(device).manual_seed(seed)
        choice = torch.Generator().manual_seed(seed)
        pairs = profile.head_dim // 2
        self.frequencies = profile.rope_theta ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
        topical = torch.zeros(2, pairs, dtype=torch.bool)
        topical[:, _TOPIC_PAIRS] = True
        epochs = math.ceil(tokens / _EPOCH)
        if group.keys is not None:
            topic_keys = min(group.keys, _EPOCH)
            self.topics_an_epoch, self.everywhere = max(1, round(_EPOCH / topic_keys)), False
        else:
            topic_keys = max(_KEY_RUN, round((group.share or 1.0) * tokens / 2))
            self.topics_an_epoch, self.everywhere = max(1, round(1 / (group.share or 1.0))), True
        num_codes = self.topics_an_epoch * (1 if self.everywhere else epochs)
        codes = torch.randn(num_codes, profile.head_dim, generator=choice).masked_fill(~topical.flatten(), 0)
        self.codes = (codes / codes.norm(dim=1, keepdim=True)).to(device)
        self.sink, self.seen = (self._band(slice(pair, pair + 1)) for pair in (_SINK_PAIR, _VERTICAL_PAIR))
        self.key_topic = torch.randint(self.topics_an_epoch, (math.ceil(tokens / _KEY_RUN),), generator=choice).to(
            device
        )
        runs = math.ceil(tokens / _QUERY_RUN)
        self.query_topic = torch.randint(self.topics_an_epoch, (runs,), generator=choice).to(device)
        self.query_epoch = torch.rand(runs, generator=choice).to(device)  # where in the past the interest lies
        self.vertical = torch.randint(min(tokens, _EPOCH), (_VERTICALS,), generator=choice).to(device)
        self.slash = int(torch.randint(1024, 32_768, (1,), generator=choice))
        # n keys of one logit hold their share of the mass when n · e^logit is that share of the whole, of which the
        # background of all other keys is `background`; a band's logit falls with the distance: its sum is solved for.
        whole = tokens / background
        count = {"sink": _SINK_TOKENS, "vertical": _VERTICALS, "topic": topic_keys}
        logit = {kind: max(0.0, math.log(group.mass[kind] * whole / count[kind])) for kind in count}
        for kind, band in (("local", _LOCAL_PAIRS), ("slash", _SLASH_PAIRS)):
            logit[kind] = self._band_logit(band, group.mass[kind] * whole, tokens, both_sides=kind == "slash")
        self.amplitude = {kind: value * profile.head_dim**0.5 / _CODE for kind, value in logit.items()}

    def _band_logit(self, pairs: slice, mass: float, tokens: int, *, both_sides: bool) -> float:
        """The peak logit at which a band's exponentials, less a background of 1 a key, add up to `mass`."""
        distance = torch.arange(tokens, dtype=torch.float32, device=self.device)
        shape = torch.zeros_like(distance)
        for frequency in self.frequencies[pairs].float():
            shape += (distance * frequency).cos()
        shape /= pairs.stop - pairs.start
        low, high = 0.0, 30.0
        for _ in range(24):
            middle = (low + high) / 2
            found = float((shape * middle).exp().sub(1).clamp(min=0).sum(dtype=torch.float64)) * (1 + both_sides)
            low, high = (middle, high) if found < mass else (low, middle)
        return low

    def keys(self, start: int, end: int) -> torch.Tensor:
        """[end - start, head_dim] float32."""
        position = torch.arange(start, end, device=self.device)
        x = self._noise(end - start, 1, self.profile.key_noise)[:, 0]
        x += _CODE * self.codes[self._code(position // _EPOCH, self.key_topic[position // _KEY_RUN])]
        x += _CODE * (self._band(_SLASH_PAIRS) + self._band(_LOCAL_PAIRS))
        x[position < _SINK_TOKENS] += _CODE * self.sink
        x[torch.isin(position, self.vertical)] += _CODE * self.seen
        return self._turn(x[:, None], position)[:, 0]

    def queries(self, start: int, end: int) -> torch.Tensor:
        """[end - start, group, head_dim] float32; the heads of a group differ in how they weigh the kinds."""
        position = torch.arange(start, end, device=self.device)
        x = self._noise(end - start, self.profile.group, self.profile.query_noise)
        run = position // _QUERY_RUN
        epoch = (self.query_epoch[run] * (position // _EPOCH + 1)).long()
        topic = self.codes[self._code(epoch, self.query_topic[run])]
        slash = self._turned(self._band(_SLASH_PAIRS), torch.tensor([-self.slash], device=self.device))[0]
        common = {
            "topic": topic, "sink": self.sink, "vertical": self.seen,
            "local": self._band(_LOCAL_PAIRS), "slash": slash,
        }  # fmt: skip
        for kind, direction in common.items():
            x += (self.amplitude[kind] * direction).expand(end - start, -1)[:, None]
        return self._turn(x, position)

    def _code(self, epoch: torch.Tensor, topic: torch.Tensor) -> torch.Tensor:
        return topic if self.everywhere else epoch * self.topics_an_epoch + topic

    def _noise(self, rows: int, heads: int, size: float) -> torch.Tensor:
        return size * torch.randn(rows, heads, self.profile.head_dim, generator=self.noise, device=self.device)

    def _band(self, pairs: slice) -> torch.Tensor:
        """A unit vector over the first channels of some pairs: what RoPE turns into a function of distance."""
        band = torch.zeros(2, self.profile.head_dim // 2, device=self.device)
        band[0, pairs] = 1.0
        return (band / band.norm()).flatten()

    def _turn(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self._turned(x, position[:, None])

    def _turned(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angle = position[..., None].double() * self.frequencies
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
