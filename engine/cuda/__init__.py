"""The engine's parts that only a GPU needs. Imported where a model is on one."""
