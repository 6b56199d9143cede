"""Every setting of the service: one frozen object, read from FOREWORD_* once in the entry point and passed down."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

GIB = 1024**3
MIB = 1024**2


class Settings(BaseSettings):
    """Each field is the environment variable FOREWORD_<NAME> (empty: not set); the README has a row for each."""

    model_config = SettingsConfigDict(env_prefix="FOREWORD_", env_ignore_empty=True, frozen=True, extra="ignore")

    data_dir: Path = Field(default=Path("~/.local/share/foreword"), description="Everything durable of this machine")
    redis_url: str | None = Field(
        default=None,
        description="Redis of several machines (redis://, rediss://, redis+sentinel://); none: one machine",
    )
    shared_dir: Path | None = Field(
        default=None, description="With Redis: folder of uploads and documents that all machines see"
    )
    cache_dir: Path = Field(default=Path("~/.cache/foreword"), description="Converted default model")
    model: str = Field(default="default", description="'default', a local Hugging Face folder, or a hub id")
    device: str = Field(default="auto", description="auto (a GPU where there is one), cpu, cuda or cuda:N")
    dtype: str = Field(default="auto", description="auto, bfloat16 or float32")
    linears: Literal["auto", "float8"] = Field(
        default="auto", description="The layers' linears: as dtype, or in FP8 (fast on GPUs from Ada and Hopper on)"
    )
    kv_dtype: Literal["auto", "bfloat16", "float32", "float8", "int8"] = Field(
        default="auto",
        description="What KV is kept in: as dtype, or FP8 or INT8 with a scale per 128 tokens and KV head",
    )
    kv_way: Literal["auto", "load", "compute", "both"] = Field(
        default="auto",
        description="How answers come by KV on a disk or shared tier: auto, load, compute (again), both (at once)",
    )
    gpus: int = Field(default=1, ge=1, description="GPUs that a worker computes one document with, device and the next")
    threads: int = Field(default=0, ge=0, description="CPU threads of the engine; 0: all cores")
    sparse_policy: Literal["adaptive", "dense", "a_shape", "vertical_slash", "block_sparse"] | None = Field(
        default=None,
        description="adaptive (where nothing is set), dense, or fixed budgets: a_shape, vertical_slash, block_sparse",
    )
    head_config: Path | None = Field(
        default=None, description="Head config in MInference's format: fixed budgets head by head"
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    insecure: bool = Field(default=False, description="Allow listening beyond loopback without API keys")
    allowed_hosts: str = Field(
        default="", description="Names, comma-separated, that a server without API keys may be called by"
    )
    api_keys_file: Path | None = Field(default=None, description="JSON file of key hashes, tenants and limits")
    log_level: str = Field(default="info", description="debug, info, warning or error")
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Port where a worker shows its metrics by itself; 0: none"
    )
    metrics_vllm_names: bool = Field(default=False, description="Show metrics under vLLM's names too")
    otlp_endpoint: str | None = Field(default=None, description="OTLP/HTTP collector that gets traces; none by default")

    webhook_allow_private: bool = Field(
        default=False, description="Send webhooks to private addresses and over plain HTTP too"
    )

    kv_disk_bytes: int = Field(default=20 * GIB, ge=0, description="Cap of stored KV on disk")
    kv_host_bytes: int = Field(default=1 * GIB, ge=0, description="Cap of KV kept in host memory")
    kv_key_file: Path | None = Field(
        default=None, description="File of base64 keys that stored KV is encrypted with; none by default"
    )
    kv_shared_dir: Path | None = Field(
        default=None, description="Folder of KV that workers of several machines share; none by default"
    )
    kv_shared_bytes: int = Field(default=200 * GIB, ge=0, description="Cap of KV in that folder")
    kv_redis_url: str | None = Field(
        default=None, description="Redis (redis://, rediss://) for the KV of small documents; none by default"
    )
    kv_redis_bytes: int = Field(default=4 * GIB, ge=0, description="Cap of KV in that Redis")
    kv_redis_document_bytes: int = Field(
        default=256 * MIB, ge=0, description="Largest KV of one document that goes to that Redis"
    )
    resume_bytes: int = Field(default=8 * GIB, ge=0, description="Cap of the hidden states kept for resuming")
    upload_bytes: int = Field(default=16 * GIB, ge=0, description="Cap of uploads on disk")
    disk_floor_bytes: int = Field(default=1 * GIB, ge=0, description="Free disk space that is never used")
    max_upload_bytes: int = Field(default=2 * GIB, ge=1, description="Largest single upload")
    max_document_tokens: int = Field(default=0, ge=0, description="0: what the model allows")

    ingest_memory_bytes: int = Field(default=2 * GIB, ge=1, description="Memory limit of the parsing process")
    ingest_timeout_s: float = Field(default=600.0, gt=0, description="Time limit of the parsing process")
    lease_s: float = Field(default=10.0, gt=0, description="A worker silent for so long loses its job")
    max_attempts: int = Field(default=3, ge=1, description="Attempts before a job is dead-lettered")
    checkpoint_s: float = Field(default=5.0, ge=0, description="Least time between two resume points of a prefill")
    max_tokens_default: int = Field(default=512, ge=1, description="Answer length where the request names none")

    @property
    def files_dir(self) -> Path:
        """Where uploads, documents and the server's secret lie: paths in records are relative to it."""
        return self.shared_dir if self.redis_url is not None and self.shared_dir is not None else self.data_dir

    def resolved(self) -> "Settings":
        """The same with absolute paths."""
        shared = None if self.shared_dir is None else self.shared_dir.expanduser().resolve()
        heads = None if self.head_config is None else self.head_config.expanduser().resolve()
        return self.model_copy(
            update={
                "shared_dir": shared,
                "kv_key_file": None if self.kv_key_file is None else self.kv_key_file.expanduser().resolve(),
                "kv_shared_dir": None if self.kv_shared_dir is None else self.kv_shared_dir.expanduser().resolve(),
                "head_config": heads,
                "data_dir": self.data_dir.expanduser().resolve(),
                "cache_dir": self.cache_dir.expanduser().resolve(),
            }
        )
