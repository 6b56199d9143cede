"""The dashboard's rows: time to first token by cache state first, what it costs, then a row a stage."""

from tools.dashboard.panel import Panel, Query, Row, Variable

VARIABLES = (
    Variable(
        "objective",
        "first token within (s)",
        ("2.0", "0.5", "1.0", "5.0", "10.0"),
        "A bucket of foreword_time_to_first_token_seconds",
    ),
    Variable("pause", "a user asks every (s)", ("60", "10", "30", "300"), "For users per device"),
)

_TTFT = "foreword_time_to_first_token_seconds"
_STAGE = "foreword_stage_seconds"
_WARM = 'cache_state=~"warm_.*"'
_COLD = 'cache_state=~"cold|partial"'
_RATE = "[$__rate_interval]"


def quantile(share: float, metric: str, *by: str, where: str = "") -> str:
    """The quantile `share` of a histogram, for each combination of the labels `by`."""
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{where}}}{_RATE})))"


def rate(metric: str, *by: str, where: str = "") -> str:
    return f"sum by ({', '.join(by)}) (rate({metric}{{{where}}}{_RATE}))"


def mean(metric: str, *by: str, where: str = "") -> str:
    """Of a histogram or summary."""
    return f"{rate(f'{metric}_sum', *by, where=where)} / {rate(f'{metric}_count', *by, where=where)}"


def parts(where: str) -> str:
    """Mean seconds of each stage in the time to first token of these cache states."""
    spent = rate("foreword_time_to_first_token_stage_seconds_sum", "stage", where=where)
    return f"{spent} / on () group_left () sum(rate({_TTFT}_count{{{where}}}{_RATE}))"


def stage_time(stage: str) -> tuple[Query, ...]:
    where = f'stage="{stage}"'
    return (Query(quantile(0.5, _STAGE, where=where), "median"), Query(quantile(0.95, _STAGE, where=where), "p95"))


_COMPUTED = (
    f'(sum(rate(foreword_prompt_tokens_total{{source="computed"}}{_RATE}))'
    f" + sum(rate(foreword_generated_tokens_total{_RATE})))"
)

ROWS = (
    Row(
        "Time to first token",
        (
            Panel(
                "First token, p95 by cache state",
                "Cold, partial: from upload complete until the KV is made. Warm: from the question's arrival.",
                (Query(quantile(0.95, _TTFT, "cache_state"), "{{cache_state}}"),),
                "s",
                log=True,
            ),
            Panel(
                "First token, median by cache state",
                "Half of the first tokens come sooner.",
                (Query(quantile(0.5, _TTFT, "cache_state"), "{{cache_state}}"),),
                "s",
                log=True,
            ),
            Panel(
                "First tokens, how many when how late",
                "Every observation, by its time to first token.",
                (Query(f"sum by (le) (increase({_TTFT}_bucket{_RATE}))", "{{le}}"),),
                "s",
                kind="heatmap",
            ),
            Panel(
                "Where a cold first token's time goes",
                "Mean seconds of each stage; together they are the mean time to first token.",
                (Query(parts(_COLD), "{{stage}}"),),
                "s",
                stacked=True,
            ),
            Panel(
                "Where a warm first token's time goes",
                "Mean seconds of each stage; kv_store is waiting for stored KV.",
                (Query(parts(_WARM), "{{stage}}"),),
                "s",
                stacked=True,
            ),
            Panel(
                "First tokens by cache state",
                "How many a second were cold, partly or wholly warm.",
                (Query(rate(f"{_TTFT}_count", "cache_state"), "{{cache_state}}"),),
                "ops",
                stacked=True,
            ),
        ),
    ),
    Row(
        "Cost",
        (
            Panel(
                "Device-seconds per million tokens",
                "Time that CPU or GPU computed, for every million tokens computed: prompt tokens that were not taken "
                "from KV, and generated ones. On a GPU these are GPU-seconds.",
                (
                    Query(
                        f"1e6 * {rate('foreword_device_seconds_total', 'device')} / on () group_left () {_COMPUTED}",
                        "{{device}}",
                    ),
                ),
                "short",
            ),
            Panel(
                "Users per device at the objective",
                "Warm answers whose first token came within the objective, for each second that a device was busy "
                "with answers, times the pause between a user's questions. An extrapolation to a device that does "
                "nothing but answer.",
                (
                    Query(
                        f'$pause * sum(rate({_TTFT}_bucket{{{_WARM}, le="$objective"}}{_RATE}))'
                        f' / sum(rate(foreword_device_seconds_total{{stage="answer"}}{_RATE}))',
                        "users",
                    ),
                ),
            ),
            Panel(
                "Busy share of devices",
                "Seconds computed a second, by stage.",
                (Query(rate("foreword_device_seconds_total", "stage"), "{{stage}}"),),
                "percentunit",
                stacked=True,
            ),
        ),
    ),
    Row(
        "Upload",
        (
            Panel(
                "Uploaded",
                "Bytes that were kept.",
                (Query(f"sum(rate(foreword_uploaded_bytes_total{_RATE}))", "uploads"),),
                "Bps",
            ),
            Panel("Time of an upload", "Until its bytes and its record are on disk.", stage_time("upload"), "s"),
            Panel(
                "Uploads on disk",
                "Against their cap; past it they are refused.",
                (Query("max(foreword_uploads_bytes)", "uploads"), Query("max(foreword_uploads_cap_bytes)", "cap")),
                "bytes",
            ),
        ),
    ),
    Row(
        "Ingest",
        (
            Panel(
                "Ingested",
                "Tokens of documents, by class.",
                (Query(rate("foreword_ingested_tokens_total", "kind"), "{{kind}}"),),
                "ops",
                stacked=True,
            ),
            Panel("Time of an ingest", "Unpacking, parsing and tokenising one upload.", stage_time("ingest"), "s"),
            Panel(
                "Failed ingests",
                "By error code, since the server started; most say what is wrong with an upload.",
                (Query('sum by (code) (foreword_job_errors_total{kind="ingest"})', "{{code}}"),),
                stacked=True,
            ),
        ),
    ),
    Row(
        "Queue and tenants",
        (
            Panel(
                "Unfinished jobs",
                "All kinds.",
                (Query('max by (state) (foreword_jobs{state=~"queued|running"})', "{{state}}"),),
                stacked=True,
            ),
            Panel(
                "Oldest waiting job",
                "Alerts begin at five minutes.",
                (Query("max(foreword_oldest_job_age_seconds)", "age"),),
                "s",
            ),
            Panel("Wait until a job is claimed", "All kinds.", stage_time("queue"), "s"),
            Panel(
                "Unfinished jobs by tenant",
                "The first 50 tenants of the keys file by name, all others as one.",
                (Query("max by (tenant, state) (foreword_tenant_jobs)", "{{tenant}} {{state}}"),),
                stacked=True,
            ),
            Panel(
                "Mean wait by tenant",
                "A tenant that waits longer than others asks for more than its share.",
                (Query(mean("foreword_tenant_queue_seconds", "tenant"), "{{tenant}}"),),
                "s",
            ),
            Panel(
                "Tokens computed by tenant",
                "Prompt and generated.",
                (Query(rate("foreword_tenant_tokens_total", "tenant"), "{{tenant}}"),),
                "ops",
                stacked=True,
            ),
            Panel(
                "Ended attempts",
                "By kind of job and outcome; queued: to be tried again.",
                (
                    Query(
                        f"sum by (kind, state) (increase(foreword_jobs_ended_total{_RATE})) > 0", "{{kind}} {{state}}"
                    ),
                ),
            ),
            Panel(
                "Workers lost",
                "Restarts, and jobs taken back from workers that fell silent.",
                (
                    Query(f"sum(increase(foreword_worker_restarts_total{_RATE}))", "restarts"),
                    Query(f"sum(increase(foreword_lease_reclaims_total{_RATE}))", "jobs taken back"),
                ),
            ),
            Panel("Workers", "Alive, their model loaded.", (Query("sum(foreword_workers)", "workers"),)),
        ),
    ),
    Row(
        "Prefill",
        (
            Panel(
                "Speed of a prefill",
                "Tokens computed a second, waiting for its turns included.",
                (
                    Query(quantile(0.5, "foreword_prefill_tokens_per_second"), "median"),
                    Query(quantile(0.05, "foreword_prefill_tokens_per_second"), "p5"),
                ),
                "ops",
            ),
            Panel("Time of a prefill", "From its first step to its last.", stage_time("prefill"), "s"),
            Panel(
                "Prompt tokens",
                "Computed, or taken from stored KV.",
                (Query(rate("foreword_prompt_tokens_total", "source"), "{{source}}"),),
                "ops",
                stacked=True,
            ),
            Panel(
                "Prefills",
                "By what was stored before.",
                (Query(f"sum by (cache_state) (increase(foreword_prefills_total{_RATE}))", "{{cache_state}}"),),
            ),
            Panel(
                "Gone on after a crash",
                "Prefills that went on from a resume point, and layers computed again behind it.",
                (
                    Query(f"sum(increase(foreword_prefills_resumed_total{_RATE}))", "prefills"),
                    Query(f"sum(increase(foreword_layers_recomputed_total{_RATE}))", "layers again"),
                ),
            ),
        ),
    ),
    Row(
        "KV store",
        (
            Panel(
                "Stored KV by tier",
                "Host memory holds copies of what is on disk.",
                (
                    Query("max by (tier) (foreword_kv_bytes)", "{{tier}}"),
                    Query("max by (tier) (foreword_kv_cap_bytes)", "cap of {{tier}}"),
                ),
                "bytes",
            ),
            Panel(
                "KV read by tier",
                "Bytes a second.",
                (Query(rate("foreword_kv_read_bytes_total", "tier"), "{{tier}}"),),
                "Bps",
                stacked=True,
            ),
            Panel(
                "KV written",
                "Bytes a second, to disk.",
                (Query(f"sum(rate(foreword_kv_written_bytes_total{_RATE}))", "written"),),
                "Bps",
            ),
            Panel(
                "How a prefix's KV was come by",
                "reused from the store; computed because it wasn't there (any more); computed because it was damaged.",
                (Query(f"sum by (decision) (increase(foreword_kv_decisions_total{_RATE}))", "{{decision}}"),),
            ),
            Panel(
                "Hits by tier",
                "Segments opened, by the slowest tier they needed.",
                (Query(f"sum by (tier) (increase(foreword_kv_hits_total{_RATE}))", "{{tier}}"),),
            ),
            Panel(
                "Evicted",
                "Segments from disk, layers of segments from host memory.",
                (
                    Query(
                        f"sum by (tier, reason) (increase(foreword_kv_evictions_total{_RATE}))", "{{tier}}, {{reason}}"
                    ),
                ),
            ),
            Panel(
                "Waiting for the KV store", "One answer's reads, or one prefill's writes.", stage_time("kv_store"), "s"
            ),
            Panel(
                "Damaged blocks",
                "Found by their checksum, or unreadable. None is served; they are computed again.",
                (
                    Query(f"sum(increase(foreword_kv_checksum_failures_total{_RATE}))", "wrong checksum"),
                    Query(f"sum(increase(foreword_kv_read_errors_total{_RATE}))", "unreadable"),
                ),
            ),
            Panel(
                "Free disk",
                "Of the data folder's file system, and the floor below which nothing is written.",
                (
                    Query("min(foreword_disk_free_bytes)", "free"),
                    Query("max(foreword_disk_floor_bytes)", "floor"),
                ),
                "bytes",
            ),
        ),
    ),
    Row(
        "Answer",
        (
            Panel(
                "Generated tokens",
                "Of all answers.",
                (Query(f"sum(rate(foreword_generated_tokens_total{_RATE}))", "tokens"),),
                "ops",
            ),
            Panel(
                "Time of an answer",
                "From the question's arrival to the last token.",
                (
                    Query(quantile(0.5, "foreword_answer_seconds"), "median"),
                    Query(quantile(0.95, "foreword_answer_seconds"), "p95"),
                ),
                "s",
            ),
            Panel(
                "Requests",
                "By status; gone: the client went away first.",
                (Query(rate("foreword_http_requests_total", "status", where='route=~"/v1/.*"'), "{{status}}"),),
                "reqps",
                stacked=True,
            ),
            Panel(
                "Time of a request, p95",
                "Until its response was complete; asking for an answer takes as long as the answer.",
                (
                    Query(
                        quantile(0.95, "foreword_http_request_seconds", "route", where='route=~"/v1/.*"'), "{{route}}"
                    ),
                ),
                "s",
                log=True,
            ),
        ),
    ),
    Row(
        "Fidelity",
        (
            Panel(
                "Recall of prefills",
                "Mean softmax mass that the kept keys hold, by class of document; only sparse parts count.",
                (Query(mean("foreword_prefill_recall", "kind"), "{{kind}}"),),
                "percentunit",
                limit=0.95,
            ),
            Panel(
                "Density of prefills",
                "Share of causal pairs that were computed, by class.",
                (Query(mean("foreword_prefill_density", "kind"), "{{kind}}"),),
                "percentunit",
            ),
            Panel(
                "Sparse prefills",
                "And those with parts whose recall stayed below the target: their record says below_target.",
                (
                    Query(f"sum(increase(foreword_prefill_recall_count{_RATE}))", "all"),
                    Query(f"sum(increase(foreword_prefills_below_target_total{_RATE}))", "below target"),
                ),
            ),
            Panel(
                "Heads by pattern",
                "KV-head groups of prefills, by what their choice came to.",
                (Query(f"sum by (pattern) (increase(foreword_heads_total{_RATE}))", "{{pattern}}"),),
                stacked=True,
            ),
            Panel(
                "Kernel paths",
                "Which implementation each operation takes.",
                (Query("max by (op, path) (foreword_kernel_path)", "{{op}}: {{path}}"),),
                kind="state",
            ),
        ),
    ),
    Row(
        "GPU",
        (
            Panel(
                "GPU memory",
                "In use, of all processes, and there is.",
                (
                    Query("max by (instance, gpu) (foreword_gpu_memory_bytes)", "{{instance}} GPU {{gpu}}"),
                    Query("max by (instance, gpu) (foreword_gpu_memory_total_bytes)", "{{instance}} GPU {{gpu}}, all"),
                ),
                "bytes",
                needs_gpu=True,
            ),
            Panel(
                "GPU utilisation",
                "Share of time that a kernel ran.",
                (Query("max by (instance, gpu) (foreword_gpu_utilization_ratio)", "{{instance}} GPU {{gpu}}"),),
                "percentunit",
                needs_gpu=True,
            ),
        ),
    ),
)

PANELS = tuple(panel for row in ROWS for panel in row.panels)
