"""One document over several devices of one host: rows dealt out by segments, K and V exchanged as they are kept."""

from engine.parallel.group import RankGroup

__all__ = ["RankGroup"]
