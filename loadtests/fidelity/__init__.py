"""Long-context fidelity: what sparse prefill loses against dense attention, task by task."""
