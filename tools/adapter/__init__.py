"""Training of the default model's long-context adapter (see docs/model.md)."""
