"""Names, types and labels of the metrics; right over many processes; bounded whatever callers make up."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.interfaces import PrefillResult, RecallReport
from service.metrics import CACHE_STATES, CONTENT_TYPE, STAGES, Metrics
from service.metrics_gpu import gpu_reporter
from service.metrics_kv import TimedKVStore
from service.metrics_labels import MOST_CODES, MOST_TENANTS, CodeLabels, TenantLabels
from service.metrics_port import WorkerPage, show_metrics
from service.metrics_state import StateCollector
from service.metrics_vllm import vllm_names
from service.settings import Settings
from tests.observe.conftest import TENANTS, Observed
from tests.service.http_fakes import serving
from tools.observe.prometheus import free_port

ROOT = Path(__file__).resolve().parents[2]


def value(text: str, name: str, **labels: str) -> float:
    """Sum of the samples that carry `labels`."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# --- names ---------------------------------------------------------------------------------------------------------


def test_the_documentation_lists_every_metric_of_a_real_scrape(observed: Observed) -> None:
    """Name, type and labels of docs/observe.md are those of the program; each one shows up while it runs."""
    checked = subprocess.run([sys.executable, "-m", "tools.observe_docs", "--check"], cwd=ROOT, capture_output=True)
    assert checked.returncode == 0, checked.stdout
    rows = re.findall(r"^\| `(foreword_\w+)` \| (\w+) \| ([^|]*) \|", (ROOT / "docs/observe.md").read_text(), re.M)
    families = {family.name: family for family in text_string_to_metric_families(observed.metrics)}
    assert len(rows) > 40
    for name, kind, labels in rows:
        if name.startswith("foreword_gpu_") or name == "foreword_summary_quotes_total":
            continue  # no GPU here; no summary in this run
        family = families[name.removesuffix("_total") if kind == "counter" else name]
        assert family.type == kind, name
        wanted = set(re.findall(r"`(\w+)`", labels))
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == wanted, name
    documented = {name.removesuffix("_total") for name, _, _ in rows}
    assert {name for name in families if name.startswith("foreword_")} <= documented


@pytest.mark.parametrize(
    "name",
    [
        "foreword_time_to_first_token_seconds_bucket",
        "foreword_stage_seconds_bucket",
        "foreword_prompt_tokens_total",
        "foreword_generated_tokens_total",
        "foreword_prefill_tokens_per_second_count",
        "foreword_prefill_density_count",
        "foreword_prefill_recall_count",
        "foreword_heads_total",
        "foreword_layers_recomputed_total",
        "foreword_jobs",
        "foreword_oldest_job_age_seconds",
        "foreword_lease_reclaims_total",
        "foreword_kv_bytes",
        "foreword_kv_evictions_total",
        "foreword_kv_checksum_failures_total",
        "foreword_kv_decisions_total",
        "foreword_kernel_path",
        "foreword_http_requests_total",
        "foreword_http_request_seconds_count",
    ],
)
def test_names_that_others_rely_on(observed: Observed, name: str) -> None:
    assert any(line.startswith(name) for line in observed.metrics.splitlines())


def test_values_of_the_real_run(observed: Observed) -> None:
    text = observed.metrics
    for stage in STAGES:
        assert value(text, "foreword_stage_seconds_count", stage=stage) > 0, stage
    for state in ("cold", "warm_disk", "warm_host"):
        total = value(text, "foreword_time_to_first_token_seconds_sum", cache_state=state)
        parts = value(text, "foreword_time_to_first_token_stage_seconds_sum", cache_state=state)
        assert total > 0, state
        assert parts == pytest.approx(total, rel=0.02), f"stages of {state} add up to its first token"
    for kind in ("repo", "doc", "bundle"):
        assert value(text, "foreword_prefill_density_count", kind=kind) >= 1, kind
    assert value(text, "foreword_prefill_recall_count", kind="doc") == 1, "only the long one has sparse parts"
    assert 0.8 < value(text, "foreword_prefill_recall_sum", kind="doc") <= 1
    assert value(text, "foreword_workers") == 1, "the killed worker's gauge is gone"
    assert value(text, "foreword_worker_restarts_total") == 1
    assert value(text, "foreword_lease_reclaims_total") >= 1
    assert value(text, "foreword_kv_checksum_failures_total") >= 1, "found by the API process"
    assert value(text, "foreword_job_errors_total", kind="ingest", code="unsupported_format") == 1
    for tenant in TENANTS:
        assert value(text, "foreword_tenant_tokens_total", tenant=tenant, source="prompt") > 500


def test_vllms_names(observed: Observed) -> None:
    text = observed.metrics
    assert value(text, "vllm:time_to_first_token_seconds_count") == value(
        text, "foreword_time_to_first_token_seconds_count"
    )
    infinite = value(text, "vllm:time_to_first_token_seconds_bucket", le="+Inf")
    assert infinite == value(text, "vllm:time_to_first_token_seconds_count") > 3
    assert value(text, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(text, "vllm:prompt_tokens_total") == value(text, "foreword_prompt_tokens_total")
    assert value(text, "vllm:generation_tokens_total") == value(text, "foreword_generated_tokens_total") > 0
    assert 0 < value(text, "vllm:prefix_cache_hits_total") < value(text, "vllm:prefix_cache_queries_total")
    assert value(text, "vllm:request_success_total") == 3
    assert 0 < value(text, "vllm:kv_cache_usage_perc") < 1
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        assert f'{name}{{model_name="smollm2-135m-long"}}' in text


def test_vllms_names_are_off_by_default_and_right_with_nothing_counted(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "vllm:" not in server.http.get("/metrics").text
    text = Metrics().render(rename=vllm_names("m")).decode()
    assert "vllm:num_requests" not in text, "an API knows of the queue, a worker doesn't"
    assert "vllm:kv_cache_usage_perc" not in text, "there is no KV here to have a share of"
    assert value(text, "vllm:prompt_tokens_total", model_name="m") == 0


def test_a_prefills_figures_go_by_its_class() -> None:
    metrics = Metrics()
    recall = RecallReport(target=0.95, mean=0.93, p5=0.9, worst=0.7, below_target=True)
    result = PrefillResult(9000, 4096, 2, 5, 0.4, recall, {"block_sparse": 80, "dense": 10}, 2.0)
    metrics.prefill_ended(result, "repo")
    text = metrics.render().decode()
    assert value(text, "foreword_prefills_below_target_total", kind="repo") == 1
    assert value(text, "foreword_prefill_recall_sum", kind="repo") == pytest.approx(0.93)
    assert value(text, "foreword_prefill_density_sum", kind="repo") == pytest.approx(0.4)
    assert value(text, "foreword_prefill_density_count", kind="doc") == 0
    assert value(text, "foreword_prefills_total", cache_state="partial") == 1
    assert value(text, "foreword_prompt_tokens_total", source="computed") == 9000 - 4096
    assert value(text, "foreword_heads_total", pattern="block_sparse") == 80


def test_series_of_a_worker_begin_at_zero() -> None:
    metrics = Metrics(["acme"])
    metrics.serving("m", "cuda")
    text = metrics.render().decode()
    for state in CACHE_STATES:
        assert f'foreword_time_to_first_token_seconds_count{{cache_state="{state}",model="m"}} 0.0' in text
    assert 'foreword_device_seconds_total{device="cuda",stage="answer"} 0.0' in text
    assert 'foreword_tenant_tokens_total{source="prompt",tenant="acme"} 0.0' in text


# --- cardinality -----------------------------------------------------------------------------------------------------

MANY = 10_000


def test_ten_thousand_paths_files_and_methods_make_a_handful_of_series(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        app = server._uvicorn.config.app

        async def call(method: str, path: str) -> None:
            scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": []}
            scope |= {"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"}
            scope |= {"server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2)}

            async def receive() -> dict:
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: dict) -> None: ...

            await app(scope, receive, send)

        async def call_all() -> None:
            for number in range(MANY // 4):
                await call("GET", f"/v1/files/file-{number:024x}")
                await call("GET", f"/nowhere/{number}")
                await call("DELETE", f"/v1/documents/doc-{number:024x}")
                await call(f"M{number}", "/v1/files")

        import asyncio

        asyncio.run(call_all())
        text = server.http.get("/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("foreword_http_requests_total{")]
    assert value(text, "foreword_http_requests_total") >= MANY
    assert len(counted) < 12, counted
    assert not re.search(r"file-0|doc-0|nowhere|M12", text)


def test_ten_thousand_tenants_and_codes_make_a_bounded_number_of_series() -> None:
    metrics = Metrics([f"tenant-{number}" for number in range(MANY)])
    for number in range(MANY):
        metrics.tenant_tokens.labels(metrics.tenant(f"tenant-{number}"), "prompt").inc()
        metrics.job_failed("ingest", "failed", f"code_{number}")
    text = metrics.render().decode()
    tenants = {line for line in text.splitlines() if line.startswith("foreword_tenant_tokens_total{")}
    codes = {line for line in text.splitlines() if line.startswith("foreword_job_errors_total{")}
    assert (len(tenants), len(codes)) == (MOST_TENANTS + 1, MOST_CODES + 1)
    assert value(text, "foreword_tenant_tokens_total") == value(text, "foreword_job_errors_total") == MANY
    assert value(text, "foreword_tenant_tokens_total", tenant="other") == MANY - MOST_TENANTS


def test_every_process_names_the_same_tenants() -> None:
    names = [f"t{number}" for number in range(MOST_TENANTS + 5)]
    first, second = TenantLabels(names), TenantLabels(names)
    for name in reversed(names):
        second(name)
    assert [first(name) for name in names] == [second(name) for name in names]
    assert (first("t0"), first(names[-1]), first("unknown")) == ("t0", "other", "other")


def test_a_code_that_is_none_is_other() -> None:
    code = CodeLabels()
    assert code("archive_bomb") == "archive_bomb"
    for made_up in ("", "A", 'x" bad', "with space", "a" * 41, "é"):
        assert code(made_up) == "other"


# --- several processes ---------------------------------------------------------------------------------------------

_WORK = """
import os, signal, sys, time
from service.metrics import Metrics
metrics = Metrics()
for _ in range(int(sys.argv[1])):
    metrics.generated_tokens.inc()
    metrics.stage_seconds.labels("answer").observe(0.3)
metrics.serving("m", "cpu")
metrics.kernel_path.labels("rope", "cpu").set(1)
print("ready", flush=True)
sys.stdin.read()
"""
_BEGIN = (
    "import sys, pathlib; from service.metrics_folder import begin_metrics; begin_metrics(pathlib.Path(sys.argv[1]))"
)
_SCRAPE = "from service.metrics import Metrics; print(Metrics().render().decode())"


class Folder:
    """Processes that count into one folder, as the server's and its workers do."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "metrics"
        self._env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self.path)}
        self.running: list[subprocess.Popen[str]] = []

    def work(self, count: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _WORK, str(count)],
            env=self._env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def scrape(self) -> str:
        command = [sys.executable, "-c", _SCRAPE]
        return subprocess.run(command, env=self._env, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def end(self, process: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> None:
        process.send_signal(number)
        process.wait(30)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()
        self.running.remove(process)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    (tmp_path / "metrics").mkdir()
    folder = Folder(tmp_path)
    yield folder
    for process in list(folder.running):
        folder.end(process)


def test_counts_of_living_and_dead_add_up_and_gauges_are_of_the_living(folder: Folder) -> None:
    first, second = folder.work(5), folder.work(7)
    text = folder.scrape()
    assert value(text, "foreword_generated_tokens_total") == 12
    assert value(text, "foreword_workers") == 2
    folder.end(first)
    for _ in range(2):  # folding the dead one's files must not count it twice
        text = folder.scrape()
        assert value(text, "foreword_generated_tokens_total") == 12
        assert value(text, "foreword_stage_seconds_count", stage="answer") == 12
        assert value(text, "foreword_stage_seconds_bucket", stage="answer", le="0.5") == 12
        assert value(text, "foreword_stage_seconds_sum", stage="answer") == pytest.approx(3.6)
        assert value(text, "foreword_workers") == 1
    folder.end(second)
    text = folder.scrape()
    assert value(text, "foreword_generated_tokens_total") == 12
    assert value(text, "foreword_workers") == 0
    assert 'op="rope"' not in text


def test_workers_that_die_again_and_again_leave_one_set_of_files(folder: Folder) -> None:
    for _ in range(2):
        folder.end(folder.work(1))
        folder.scrape()
    assert value(folder.scrape(), "foreword_generated_tokens_total") == 2
    names = {path.name for path in folder.path.glob("*.db")}
    assert {name for name in names if "dead" in name} == {"counter_dead.db", "histogram_dead.db", "summary_dead.db"}
    assert len(names) <= 3 + 5, "besides them only the last scraper's own"
    assert not list(folder.path.glob("*.new"))


def test_a_new_server_forgets_the_dead_and_keeps_living_workers(folder: Folder) -> None:
    living, dead = folder.work(3), folder.work(4)
    folder.end(dead)
    folder.scrape()
    subprocess.run([sys.executable, "-c", _BEGIN, str(folder.path.parent)], cwd=ROOT, check=True)
    text = folder.scrape()
    assert value(text, "foreword_generated_tokens_total") == 3
    assert value(text, "foreword_workers") == 1
    assert living.poll() is None


def test_two_processes_of_one_id_count_apart(folder: Folder, tmp_path: Path) -> None:
    """As two containers' first processes on one volume do: both are number 1."""
    code = textwrap.dedent(
        """
        import os, sys
        os.getpid = lambda: 1
        """
    )
    processes = []
    for count in (2, 3):
        process = subprocess.Popen(
            [sys.executable, "-c", code + _WORK, str(count)],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder.path)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        folder.running.append(process)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    text = folder.scrape()
    assert value(text, "foreword_generated_tokens_total") == 5
    assert value(text, "foreword_workers") == 2


def test_files_are_whole_so_that_a_full_disk_kills_nobody(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _BEGIN, str(tmp_path)], cwd=ROOT, check=True)
    files = list((tmp_path / "metrics").glob("*.db"))
    assert len(files) == 5
    for path in files:
        assert path.stat().st_blocks * 512 >= path.stat().st_size == 1 << 20


# --- a worker's own port, GPUs, the KV store's time ----------------------------------------------------------------


def test_a_worker_shows_its_metrics_on_a_port_of_its_own(tmp_path: Path) -> None:
    metrics, port = Metrics(), free_port()
    metrics.generated_tokens.inc(3)
    settings = Settings(data_dir=tmp_path, kv_disk_bytes=1000, kv_host_bytes=500, metrics_vllm_names=True)
    page = WorkerPage(metrics, settings)
    close = show_metrics(page.text, "127.0.0.1", port)
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        answer = httpx.get(url)
        assert answer.headers["content-type"] == CONTENT_TYPE
        assert value(answer.text, "foreword_generated_tokens_total") == 3
        assert "foreword_kv_bytes" not in answer.text, "the model is being loaded"
        page.opened(lambda: {"disk": 250, "host": 50}, "m")
        text = httpx.get(url).text
        assert value(text, "foreword_kv_bytes", tier="disk") == 250
        assert value(text, "foreword_kv_cap_bytes", tier="host") == 500
        assert value(text, "foreword_disk_free_bytes") > 0
        assert value(text, "vllm:kv_cache_usage_perc", model_name="m") == 0.25
        assert value(text, "vllm:generation_tokens_total", model_name="m") == 3
        assert "vllm:num_requests" not in text, "of the queue it knows nothing"
        page.opened(lambda: {}["the disk fails"], "m")
        assert httpx.get(url).status_code == 500
        page.closed()
        assert httpx.get(url).status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/other").status_code == 404
        show_metrics(page.text, "127.0.0.1", port)()  # taken: said in the log, and the worker goes on
    finally:
        close()


def test_an_api_of_several_machines_shows_no_kv_against_a_cap_that_is_not_its_own(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        metrics = Metrics()
        usage: dict[str, int] = {}
        state = StateCollector(server.settings, server.queue, lambda: usage, lambda: 0, tenant=metrics.tenant)
        assert "foreword_kv_cap_bytes{" not in metrics.render(state).decode()
        usage = {"disk": 5, "host": 0}
        assert value(metrics.render(state).decode(), "foreword_kv_cap_bytes", tier="disk") > 0


class FakeNvml(ModuleType):
    """pynvml with two GPUs; what it can't tell is set by the test."""

    class NVMLError(Exception): ...

    class NVMLError_NotSupported(NVMLError): ...

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.fail: dict[int, type[Exception]] = {}

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) * 10**9, total=80 * 10**9)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle in self.fail:
            raise self.fail[handle]()
        return SimpleNamespace(gpu=50 + handle)


def test_gpus_are_reported_and_a_lost_one_is_left_out() -> None:
    metrics, nvml = Metrics(), FakeNvml()
    report = gpu_reporter(metrics, lambda name: nvml)
    report()
    text = metrics.render().decode()
    assert value(text, "foreword_gpu_memory_bytes", gpu="1") == 2e9
    assert value(text, "foreword_gpu_memory_total_bytes", gpu="0") == 80e9
    assert value(text, "foreword_gpu_utilization_ratio", gpu="0") == 0.5
    nvml.fail = {0: FakeNvml.NVMLError_NotSupported, 1: FakeNvml.NVMLError}
    report()
    nvml.fail = {}
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=7, total=8)  # type: ignore[method-assign]
    report()
    text = metrics.render().decode()
    assert value(text, "foreword_gpu_memory_bytes", gpu="0") == 7, "a slice without utilisation has memory still"
    assert value(text, "foreword_gpu_memory_bytes", gpu="1") == 2e9, "the lost one is asked no more"


@pytest.mark.parametrize("error", [ImportError("no module"), FakeNvml.NVMLError("no driver")])
def test_without_nvml_there_are_no_gpu_series_and_no_error(error: Exception) -> None:
    metrics = Metrics()

    def load(name: str) -> ModuleType:
        raise error

    gpu_reporter(metrics, load)()
    assert not re.search(r"^foreword_gpu_\w+\{", metrics.render().decode(), re.M)


class SlowStore:
    """A store whose every call takes a while."""

    layout = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            threading.Event().wait(0.01)
            return self

        return call

    tier = "disk"


def test_waiting_for_the_kv_store_is_timed_and_computing_is_not() -> None:
    metrics = Metrics()
    store = TimedKVStore(SlowStore(), metrics)  # type: ignore[arg-type]
    reader = store.open_reader([])
    threading.Event().wait(0.2)
    reader.read_layer(0)
    reader.close()
    reader.close()
    writer = store.open_writer([], first=0, owner="job")
    writer.write_layer(0, 0, memoryview(b""))
    writer.flush()
    writer.commit()
    text = metrics.render().decode()
    assert value(text, "foreword_stage_seconds_count", stage="kv_store") == 2, "one each, closed once or twice"
    waited = value(text, "foreword_stage_seconds_sum", stage="kv_store")
    assert metrics.kv_waited_s == pytest.approx(waited)
    assert 0.06 <= waited < 0.2
