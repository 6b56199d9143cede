"""The stages of a job in the worker, one module each: ingest, prefill, answer."""
