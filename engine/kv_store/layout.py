"""Sizes: how many layers share a file, and how many bytes a segment takes on disk."""

from engine.interfaces import KVLayout

ALIGNMENT = 4096  # bytes; headers and layers start on it, so that files can be read with O_DIRECT
MAX_LAYERS_PER_GROUP = 128  # what one header's checksum table holds
TARGET_GROUP_BYTES = 24 * 1024**2
FULL_SEGMENT_TOKENS = 4096


def layout_for(num_layers: int, bytes_per_token: int, scale_bytes: int = 0) -> KVLayout:
    """The layout whose files of full segments come closest to 24 MiB (16–32 MiB for the usual models).

    `bytes_per_token` is one layer's K and V together, `scale_bytes` their scales of 128 tokens. Raises ValueError
    unless layers and bytes a token are positive.
    """
    if num_layers < 1 or bytes_per_token < 1:
        raise ValueError(f"got {num_layers} layers of {bytes_per_token} bytes a token, expected positive numbers")
    most = round(TARGET_GROUP_BYTES / (FULL_SEGMENT_TOKENS * bytes_per_token))
    most = max(1, min(most, num_layers, MAX_LAYERS_PER_GROUP))
    num_groups = -(-num_layers // most)
    even = -(-num_layers // num_groups)
    return KVLayout(num_layers, bytes_per_token, layers_per_group=even, scale_bytes=scale_bytes)


def check_layout(layout: KVLayout) -> None:
    """Raises ValueError for a layout that cannot be stored."""
    if layout.num_layers < 1 or layout.bytes_per_token < 1 or layout.scale_bytes < 0:
        raise ValueError(f"got {layout}, expected at least one layer and one byte a token")
    if not 1 <= layout.layers_per_group <= MAX_LAYERS_PER_GROUP:
        raise ValueError(f"got {layout.layers_per_group} layers a group, expected 1 to {MAX_LAYERS_PER_GROUP}")


def same_content(one: KVLayout, other: KVLayout) -> bool:
    """Whether layers written under one layout can be read under the other: how files group them may differ."""
    return (one.num_layers, one.bytes_per_token, one.scale_bytes) == (
        other.num_layers,
        other.bytes_per_token,
        other.scale_bytes,
    )


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def group_layers(layout: KVLayout, group: int) -> range:
    """The layers that lie in one group's file."""
    first = group * layout.layers_per_group
    return range(first, min(first + layout.layers_per_group, layout.num_layers))


def group_file_bytes(layout: KVLayout, num_tokens: int, group: int) -> int:
    """Length of the file of one (segment, group): the header, then each layer padded to the alignment."""
    return ALIGNMENT + len(group_layers(layout, group)) * aligned(layout.layer_bytes(num_tokens))


def segment_file_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Bytes that a segment's files take on disk: what its reservation counts."""
    return layout.num_groups * ALIGNMENT + layout.num_layers * aligned(layout.layer_bytes(num_tokens))
