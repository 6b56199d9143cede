"""A model of made weights whose heads attend as long-context heads do: `python -m loadtests.shaped_model FOLDER`.

Fully random weights attend to everything alike, so no sparse prefill could leave anything out. Here all embeddings
share a constant component, and W_q and W_k of each head map it to vectors that RoPE turns into a product that falls
with the distance, as a power of it: a head needs its own number of keys, drawn once, about 1K to 28K, for 95 % of its
softmax mass at a million tokens (closed form: `kernel`). Beside it everything is random: content shifts logits by about
1.4, layers add little to the residual stream, so that the constant component reaches the last one.

Shapes are Llama-3-8B's; tokeniser, vocabulary and chat template are the default model's. Answers are noise; density and
recall of a prefill are measured by the engine like any other's. `--measure TOKENS` does that for a few layers of small
width on this machine, and says what single rows at that length need.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine import default_model
from service.settings import Settings

TOKENS = 1 << 20  # where a head needs the keys that it is said to need
# Without content, which spreads a row's mass over about half as many again (`--measure 1048576`).
FEWEST_KEYS, MOST_KEYS = 512, 16_384
# Of a row's channels after RMS norm: the constant component's energy in the embeddings, and what a layer's attention
# or MLP adds to the residual stream, of whose channels the embeddings' have RMS 1.
CONSTANT, ADDED = 0.5, 0.03
_KEY, _KEY_NOISE, _QUERY_NOISE = 4.0, 1.0, 0.5  # a key's constant channels; standard deviations of content
_FLAT = 8  # a head looks alike at all distances below its keys / 8
_MASS = 0.95
_BLOCK = 128
# RMS of an attention's output where values are of RMS 1, and of SiLU(gate) * up where both are.
_ATTENDED, _GATED = 0.75, 0.6


@dataclass(frozen=True)
class Shape:
    """Of a Llama; `theta` as published for a Llama-3-8B that reads a million tokens."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14_336
    theta: float = 3.58e9
    max_positions: int = 1 << 23

    def frequencies(self) -> torch.Tensor:
        """[head_dim / 2] float64, radians a token."""
        pairs = self.head_dim // 2
        return self.theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


LLAMA_8B = Shape()
SMALL = Shape(layers=2, hidden=1024, heads=16, kv_heads=4, intermediate=2048)


def head_keys(shape: Shape, seed: int) -> torch.Tensor:
    """How many keys each head needs, [layers, heads] float64: even in the logarithm over all KV groups of the model,
    heads of a group within a factor of 1.3 of their group's."""
    random = torch.Generator().manual_seed(seed)
    groups = shape.layers * shape.kv_heads
    place = (torch.randperm(groups, generator=random).double() + 0.5) / groups
    keys = FEWEST_KEYS * (MOST_KEYS / FEWEST_KEYS) ** place
    own = torch.rand(groups, shape.heads // shape.kv_heads, generator=random, dtype=torch.float64) * 2 - 1
    return (keys[:, None] * 1.3**own).view(shape.layers, shape.heads)


def bands(shape: Shape, keys: torch.Tensor) -> torch.Tensor:
    """The rotary pairs that carry each head's locality, [heads, head_dim / 2] bool: those that turn more slowly than
    its nearest keys, and still turn within a few million tokens."""
    frequencies = shape.frequencies()
    return (frequencies <= _FLAT / keys[:, None]) & (frequencies >= 1 / (4 * TOKENS))


def kernel(shape: Shape, band: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The constant part of each head's logit as a share of its peak, [heads, distances] float64."""
    turned = (distances * shape.frequencies()[:, None]).cos()
    return band.double() @ turned / band.sum(1, keepdim=True)


def peaks(shape: Shape, keys: torch.Tensor, *, tokens: int = TOKENS) -> torch.Tensor:
    """Logit of each head at distance 0, [heads] float64, at which its best `keys` keys of `tokens` hold 95 % of the
    softmax mass. Content spreads all logits alike and is left out."""
    distances = torch.logspace(0, math.log2(tokens), 8192, base=2, dtype=torch.float64)
    width = torch.diff(distances, prepend=torch.zeros(1, dtype=torch.float64))
    best, order = kernel(shape, bands(shape, keys), distances).sort(dim=1, descending=True)
    width = width[order]
    kept = (width.cumsum(1) <= keys[:, None]).double()
    low, high = torch.zeros(len(keys), dtype=torch.float64), torch.full((len(keys),), 60.0, dtype=torch.float64)
    for _ in range(30):
        middle = (low + high) / 2
        mass = width * (best * middle[:, None] - middle[:, None]).exp()
        short = (mass * kept).sum(1) < _MASS * mass.sum(1)
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return (low + high) / 2


class ShapedWeights:
    """Tensors by their Hugging Face names, bfloat16 on `device`; the same seed gives the same on one kind of device."""

    def __init__(self, shape: Shape, vocabulary: int, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.shape, self._vocabulary, self._seed, self._device = shape, vocabulary, seed, torch.device(device)
        signs = torch.randint(2, (shape.hidden,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self._constant = signs.float().to(self._device)  # RMS 1
        self._keys = head_keys(shape, seed)

    def embedding(self) -> dict[str, torch.Tensor]:
        content = self._normal(-1, self._vocabulary, self.shape.hidden, std=(1 - CONSTANT) ** 0.5)
        return {"model.embed_tokens.weight": self._stored(content.add_(self._constant * CONSTANT**0.5))}

    def head(self) -> dict[str, torch.Tensor]:
        return {
            "model.norm.weight": self._ones(),
            "lm_head.weight": self._stored(self._normal(-2, self._vocabulary, self.shape.hidden, std=0.02)),
        }

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        shape, prefix = self.shape, f"model.layers.{index}."
        hidden, inner, attended = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
        random = torch.Generator(self._device).manual_seed(self._seed * 1009 + index + 1)
        # The constant component's share of a row's energy as it reaches this layer.
        constant = CONSTANT / (1 + 2 * index * ADDED**2)
        query, key = self._local(index)

        def normal(rows: int, columns: int, std: float) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random, device=self._device) * std

        def mapped(target: torch.Tensor, noise: float) -> torch.Tensor:
            """[rows] → [rows, hidden]: maps the constant component to `target`, content to channels of std `noise`."""
            made = normal(len(target), hidden, noise / (hidden * (1 - constant)) ** 0.5)
            along = made @ self._constant / hidden
            wanted = target.to(made) / (hidden * constant**0.5)
            return made.add_((wanted - along)[:, None] * self._constant)

        tensors = {
            "self_attn.q_proj": mapped(query, _QUERY_NOISE),
            "self_attn.k_proj": mapped(key, _KEY_NOISE),
            "self_attn.v_proj": normal(shape.kv_heads * shape.head_dim, hidden, hidden**-0.5),
            "self_attn.o_proj": normal(hidden, attended, ADDED / (_ATTENDED * attended**0.5)),
            "mlp.gate_proj": normal(inner, hidden, hidden**-0.5),
            "mlp.up_proj": normal(inner, hidden, hidden**-0.5),
            "mlp.down_proj": normal(hidden, inner, ADDED / (_GATED * inner**0.5)),
        }
        named = {f"{prefix}{name}.weight": self._stored(tensor) for name, tensor in tensors.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        return named | {f"{prefix}{name}.weight": self._ones() for name in norms}

    def _local(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the constant component becomes: queries [heads * head_dim], keys [kv_heads * head_dim]."""
        shape, keys = self.shape, self._keys[layer]
        band = bands(shape, keys)
        peak = peaks(shape, keys) * shape.head_dim**0.5 / (_KEY * band.sum(1))
        still = torch.zeros_like(band, dtype=torch.float64)
        query = torch.cat((band * peak[:, None], still), 1)
        # A key has the pairs of all its group's heads.
        grouped = band.view(shape.kv_heads, -1, band.shape[1]).any(1).double() * _KEY
        key = torch.cat((grouped, torch.zeros_like(grouped)), 1)
        return query.flatten(), key.flatten()

    def _normal(self, seed: int, rows: int, columns: int, *, std: float) -> torch.Tensor:
        random = torch.Generator(self._device).manual_seed(self._seed * 1009 + 500 - seed)
        return torch.randn(rows, columns, generator=random, device=self._device) * std

    def _ones(self) -> torch.Tensor:
        return torch.ones(self.shape.hidden, dtype=torch.bfloat16, device=self._device)

    @staticmethod
    def _stored(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.bfloat16)


def write_model(
    folder: Path, shape: Shape = LLAMA_8B, *, tokenizer: Path, seed: int = 0, device: torch.device | str = "cpu"
) -> int:
    """Write the model into `folder`, a shard a layer; returns its bytes. `tokenizer` is a folder of tokenizer.json,
    templates and config.json. Raises ValueError where `folder` holds something already."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: expected a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copyfile(file, folder / file.name)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
    weights = ShapedWeights(shape, config["vocab_size"], seed=seed, device=device)
    places: dict[str, str] = {}
    size_bytes = 0
    for number, tensors in enumerate(_shards(weights)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, str(folder / name), metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size_bytes += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size_bytes}, "weight_map": places})
    _write_json(folder / "config.json", _config(shape, config))
    return size_bytes


def _shards(weights: ShapedWeights) -> Iterator[dict[str, torch.Tensor]]:
    yield weights.embedding()
    for index in range(weights.shape.layers):
        yield weights.layer(index)
    yield weights.head()


def _config(shape: Shape, tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.theta,
        "tie_word_embeddings": False,
        **{key: tokenizer_config[key] for key in kept if key in tokenizer_config},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def group_keys(masses: torch.Tensor) -> torch.Tensor:
    """How many keys each KV group needs, in whole blocks and one list a group, until its heads keep 95 % on average.

    masses [kv_heads, group, blocks of 128 keys], each head's adding up to 1 → [kv_heads] int64.
    """
    best = masses.double().mean(1).sort(dim=1, descending=True).values.cumsum(1)
    return ((best < _MASS).sum(1) + 1) * _BLOCK


@torch.inference_mode()
def row_masses(weights: ShapedWeights, layer: int, ids: torch.Tensor) -> torch.Tensor:
    """Softmax masses of the last of the tokens `ids` [tokens] over all, were `layer` the first one: by its own weights
    and RoPE in float32, without the engine. [kv_heads, group, blocks of 128 keys] float32."""
    shape, made = weights.shape, weights.layer(layer)
    table = weights.embedding()["model.embed_tokens.weight"].float()
    q_proj, k_proj = (made[f"model.layers.{layer}.self_attn.{name}_proj.weight"].float() for name in ("q", "k"))

    def projected(rows: torch.Tensor, start: int, matrix: torch.Tensor) -> torch.Tensor:
        x = table[rows]
        x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
        angle = torch.arange(start, start + len(rows)).double()[:, None] * shape.frequencies()
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
        first, second = (x @ matrix.T).view(len(rows), -1, shape.head_dim).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    q = projected(ids[-1:], len(ids) - 1, q_proj)[0].view(shape.kv_heads, -1, shape.head_dim)
    scores = [
        torch.einsum("hgd,thd->hgt", q, projected(ids[start : start + 16_384], start, k_proj))
        for start in range(0, len(ids), 16_384)
    ]
    mass = (torch.cat(scores, 2) * shape.head_dim**-0.5).softmax(-1)
    return torch.nn.functional.pad(mass, (0, -len(ids) % _BLOCK)).unflatten(2, (-1, _BLOCK)).sum(-1)


def measure(shape: Shape, tokens: int, *, rows: int, tokenizer: Path, seed: int) -> None:
    """Prints what the engine's prefill of `tokens` random tokens measures, and what single rows need at their end."""
    import numpy as np

    from engine.engine import LocalEngine
    from engine.interfaces import PrefillRequest
    from engine.kv_format import KVFormat
    from engine.model import load_model
    from loadtests.engine_gpu import KeptInMemory

    ids = np.random.default_rng(seed).integers(0, 49_152, tokens).astype(np.uint32)
    weights = ShapedWeights(shape, 49_152, seed=seed)
    drawn = head_keys(shape, seed)
    print(f"heads drawn for {drawn.mean():.0f} keys on average, {drawn.min():.0f} to {drawn.max():.0f}")
    for layer in range(shape.layers):
        found = [group_keys(row_masses(weights, layer, torch.from_numpy(ids[: tokens - 97 * row]).long()))
                 for row in range(rows)]  # fmt: skip
        if found:
            keys = torch.stack(found).double()
            by_group = keys.mean(0).long().tolist()
            print(f"layer {layer}: rows at {tokens} tokens need {keys.mean():.0f} keys, by group {by_group}")
    if tokens > 1 << 17:
        return
    with tempfile.TemporaryDirectory(prefix="shaped-") as scratch:
        write_model(Path(scratch) / "model", shape, tokenizer=tokenizer, seed=seed)
        model = load_model(Path(scratch) / "model", dtype=torch.float32)
    store: Any = KeptInMemory(KVFormat(model.dtype).layout(model.spec), keep=False)
    prefill = LocalEngine(model, lambda ids: "", store).start_prefill(
        PrefillRequest(tokens=ids, salt=b"measure", owner="measure", holder="measure", fidelity="default")
    )
    started = time.monotonic()
    while prefill.step():
        pass
    result = prefill.result
    print(f"engine: density {result.density:.4f}, {result.density * (tokens + 1) / 2:.0f} keys a row, "
          f"recall {result.recall}, heads {dict(result.heads)}, {time.monotonic() - started:.0f} s")  # fmt: skip
    for segment in result.segment_recalls[-2:]:
        print(
            f"  rows {segment.start} to {segment.end}: {segment.density * (segment.start + segment.end) / 2:.0f} keys"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a new folder, such as /dev/shm/model")
    parser.add_argument("--tokenizer", type=Path, help="folder of tokenizer, template and config.json; the default's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="fewer than 32")
    parser.add_argument("--measure", type=int, metavar="TOKENS", help="print density of a small model; write nothing")
    parser.add_argument("--rows", type=int, default=4, help="with --measure: single rows of each layer")
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer or default_model.tokenizer_folder(Settings().resolved().cache_dir)
    shape = LLAMA_8B if arguments.measure is None else SMALL
    if arguments.layers is not None:
        shape = replace(shape, layers=arguments.layers)
    if arguments.measure is not None:
        measure(shape, arguments.measure, rows=arguments.rows, tokenizer=tokenizer, seed=arguments.seed)
    elif arguments.folder is None:
        parser.error("a folder or --measure is needed")
    else:
        started = time.monotonic()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        size = write_model(arguments.folder, shape, tokenizer=tokenizer, seed=arguments.seed, device=device)
        print(f"{size / 1e9:.1f} GB in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
