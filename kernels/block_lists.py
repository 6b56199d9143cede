"""Block lists: which key blocks each block of rows attends to, in compressed sparse rows (CSR)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockLists:
    """One list of key blocks for every (row block, list head), on the device, never read by the host.

    List `row_block * list_heads + list_head` is `blocks[offsets[i] : offsets[i + 1]]`, ascending, without repeats. A
    list head is a KV head (one list for its whole group of query heads) or a query head.
    """

    offsets: torch.Tensor  # [row_blocks * list_heads + 1] int64
    blocks: torch.Tensor  # [capacity] int32; capacity ≥ offsets[-1], what lies behind is never read
    list_heads: int
    row_block: int  # rows (tokens) in a row block
    key_block: int  # keys in a key block

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.dim() != 1:
            raise ValueError(
                f"offsets: expected int64 [lists + 1], got {self.offsets.dtype} {list(self.offsets.shape)}"
            )
        if self.blocks.dtype != torch.int32 or self.blocks.dim() != 1:
            raise ValueError(f"blocks: expected int32 [capacity], got {self.blocks.dtype} {list(self.blocks.shape)}")
        if self.offsets.device != self.blocks.device:
            raise ValueError(f"offsets on {self.offsets.device}, blocks on {self.blocks.device}: expected one device")
        if self.list_heads < 1 or (self.offsets.numel() - 1) % self.list_heads:
            raise ValueError(f"{self.offsets.numel() - 1} lists do not divide into {self.list_heads} list heads")
        for name, size in (("row_block", self.row_block), ("key_block", self.key_block)):
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name}: expected a power of two of at least 16, got {size}")

    @property
    def row_blocks(self) -> int:
        return (self.offsets.numel() - 1) // self.list_heads

    @property
    def counts(self) -> torch.Tensor:
        """Key blocks in each list: [row_blocks, list_heads] int64."""
        return self.offsets.diff().view(self.row_blocks, self.list_heads)


def lists_from_mask(mask: torch.Tensor, *, row_block: int, key_block: int) -> BlockLists:
    """Block lists of a boolean mask [row_blocks, list_heads, key_blocks]. No host sync.

    Raises ValueError when `mask` is not boolean with three dimensions.
    """
    if mask.dtype != torch.bool or mask.dim() != 3:
        raise ValueError(
            f"mask: expected bool [row_blocks, list_heads, key_blocks], got {mask.dtype} {list(mask.shape)}"
        )
    row_blocks, list_heads, key_blocks = mask.shape
    offsets = torch.zeros(row_blocks * list_heads + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask.flatten(0, 1).sum(1), 0, out=offsets[1:])
    # Every element is written somewhere: kept ones at their rank, the others behind the capacity that is returned.
    flat = mask.flatten()
    rank = torch.where(flat, flat.cumsum(0) - 1, flat.numel())
    blocks = torch.empty(flat.numel() + 1, dtype=torch.int32, device=mask.device)
    ids = torch.arange(key_blocks, dtype=torch.int32, device=mask.device).repeat(row_blocks * list_heads)
    blocks.scatter_(0, rank, ids)
    return BlockLists(offsets, blocks[:-1], list_heads, row_block, key_block)


def mask_from_lists(lists: BlockLists, key_blocks: int) -> torch.Tensor:
    """The boolean mask [row_blocks, list_heads, key_blocks] of block lists (reads the lists' total on the host)."""
    total = int(lists.offsets[-1])
    which = torch.repeat_interleave(
        torch.arange(lists.offsets.numel() - 1, device=lists.blocks.device), lists.offsets.diff(), output_size=total
    )
    mask = torch.zeros(lists.offsets.numel() - 1, key_blocks, dtype=torch.bool, device=lists.blocks.device)
    mask[which, lists.blocks[:total].long()] = True
    return mask.view(lists.row_blocks, lists.list_heads, key_blocks)


def causal_lists(
    *, rows: int, row_offset: int, list_heads: int, row_block: int, key_block: int, device: torch.device | str
) -> BlockLists:
    """Lists that hold every block with a causal key: block-sparse attention over them is dense attention."""
    ends = torch.arange(row_block, rows + row_block, row_block, device=device).clamp(max=rows) + row_offset
    key_blocks = -(-(row_offset + rows) // key_block)
    starts = torch.arange(key_blocks, device=device) * key_block
    mask = (starts < ends[:, None])[:, None].expand(-1, list_heads, -1)
    return lists_from_mask(mask, row_block=row_block, key_block=key_block)
