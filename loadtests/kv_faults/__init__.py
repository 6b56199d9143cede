"""Faults of every kind on the KV store's real code paths: nothing wrong may be served, no fault uncounted."""
