"""Everything the engine can raise.

EngineError
├── ModelError            the model folder is missing, incomplete or of an unknown family
├── InvalidRequest        a request that can never succeed
│   └── ContextTooLong    more tokens than the model's positions
├── RankLost              a process that computed one of a document's parts is gone; the engine must be opened anew
├── OutOfMemory           the work needs more memory than the machine has free
├── Cancelled             the caller withdrew the work between two steps
└── KVError
    ├── KVCorrupt         stored bytes do not match their checksum (handled as a miss)
    │   └── KVSealed      they are encrypted with a key that is not here (handled as a miss)
    ├── KVMissing         a segment that was promised is not there (evicted or corrupt)
    └── StorageFull       the cap or the disk has no room even after eviction
"""


class EngineError(Exception):
    """Base of all engine errors; `code` is the machine-readable name shown to users."""

    code = "engine_error"


class ModelError(EngineError):
    code = "model_error"


class InvalidRequest(EngineError):
    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, got: int, limit: int) -> None:
        super().__init__(f"{got} tokens are more than the {limit} positions of this model")
        self.got, self.limit = got, limit


class RankLost(EngineError):
    code = "rank_lost"


class OutOfMemory(EngineError):
    code = "out_of_memory"

    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(f"needs {needed_bytes} bytes of memory, {available_bytes} are free")
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class Cancelled(EngineError):
    code = "cancelled"


class KVError(EngineError):
    code = "kv_error"


class KVCorrupt(KVError):
    code = "kv_corrupt"


class KVSealed(KVCorrupt):
    code = "kv_sealed"


class KVMissing(KVError):
    code = "kv_missing"


class StorageFull(KVError):
    code = "storage_full"

    def __init__(self, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(f"needs {needed_bytes} bytes, {available_bytes} can be made available")
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
