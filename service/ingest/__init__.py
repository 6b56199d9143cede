"""Ingest: uploaded bytes → one exact token stream with a manifest.

The two calls for the rest of the product; both are free of torch and safe to call from any thread:

    ingest(sources, out_dir, kind=…, tokenizer_file=…, limits=…, options=…, base_manifest=…, progress=…) → IngestSummary
    locate(folder, text) → list[Place]      cite(folder, answer_text) → list[Citation]      (service.ingest.locate)

`ingest` parses in a child process of its own (`python -m service.ingest.child`: limits, no network) and publishes
`document.txt`, `tokens.npy`, `offsets.npy` and `manifest.json` in `out_dir` at once. It raises IngestError.
"""

from service.ingest.base import KINDS, IngestError, IngestLimits, IngestOptions, IngestSummary, Kind, Source
from service.ingest.runner import ingest

__all__ = ["KINDS", "IngestError", "IngestLimits", "IngestOptions", "IngestSummary", "Kind", "Source", "ingest"]
