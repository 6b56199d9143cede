"""One trace over API and worker, as a real OTLP receiver got it; and nothing at all while traces are off."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.traces import TracesUnavailable, open_traces, trace_id_of, traces_to
from tests.observe.conftest import CALLER, MARKERS, REQUEST_ID, Observed
from tests.observe.otlp import ReceivedSpan

ROOT = Path(__file__).resolve().parents[2]
TRACE = trace_id_of(CALLER)


@pytest.fixture
def trace(observed: Observed) -> list[ReceivedSpan]:
    return [span for span in observed.spans if span.trace_id == TRACE]


def test_one_trace_spans_both_processes_and_every_stage(trace: list[ReceivedSpan]) -> None:
    stages = {
        (span.process, span.attributes["foreword.stage"]) for span in trace if "foreword.stage" in span.attributes
    }
    worker = {("worker", stage) for stage in ("ingest", "queue", "prefill", "kv_store", "answer")}
    assert stages == {("api", "upload"), *worker}
    servers = [span for span in trace if "http.route" in span.attributes]
    assert {span.name for span in servers} == {"POST /v1/files", "POST /v1/chat/completions"}
    caller_span = CALLER.split("-")[2]
    assert all(span.parent_id == caller_span for span in servers)
    roots = {span.span_id for span in servers}
    assert all(span.parent_id in roots for span in trace if span not in servers)


def test_stages_follow_each_other_in_time(trace: list[ReceivedSpan]) -> None:
    first = {
        name: min((s for s in trace if s.name == name), key=lambda s: s.start_s)
        for name in ("upload", "ingest", "prefill", "answer")
    }
    order = [first[name] for name in ("upload", "ingest", "prefill", "answer")]
    for before, after in pairwise(order):
        # A worker may take up the ingest before the upload's request has been answered.
        assert before.start_s <= before.end_s, before.name
        assert before.start_s <= after.start_s, (before.name, after.name)
        assert before.end_s <= after.end_s, (before.name, after.name)


def test_answers_carry_the_genai_attributes(trace: list[ReceivedSpan]) -> None:
    cold_to_warm = sorted((span for span in trace if span.name == "answer"), key=lambda span: span.start_s)
    assert len(cold_to_warm) == 2
    attributes = cold_to_warm[0].attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "foreword"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "smollm2-135m-long"
    assert attributes["gen_ai.request.max_tokens"] == 16
    assert attributes["gen_ai.request.temperature"] == 0
    assert attributes["gen_ai.response.finish_reasons"][0] in ("stop", "length")
    assert 0 < attributes["gen_ai.usage.output_tokens"] <= 16
    assert attributes["gen_ai.usage.input_tokens"] > attributes["gen_ai.usage.cache_read.input_tokens"] > 1000
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert [span.attributes["foreword.cache_state"] for span in cold_to_warm] == ["warm_disk", "warm_host"]


def test_failures_are_errors_and_no_text_travels(observed: Observed) -> None:
    failed = {span.attributes["error.type"] for span in observed.spans if span.failed and span.name == "ingest"}
    assert "unsupported_format" in failed
    told = repr([(span.name, span.attributes) for span in observed.spans])
    for what, marker in MARKERS.items():
        assert marker not in told, what
    assert observed.answer
    assert observed.answer not in told


def test_log_lines_name_the_trace(observed: Observed) -> None:
    lines = [line for line in observed.log_lines() if line.get("trace_id") == TRACE]
    assert {line["request_id"] for line in lines} == {REQUEST_ID}
    assert len({line["process"] for line in lines}) == 2


# --- without a server ----------------------------------------------------------------------------------------------


def test_a_malformed_traceparent_begins_a_trace_of_its_own() -> None:
    exporter = InMemorySpanExporter()
    traces = traces_to(SimpleSpanProcessor(exporter), process="api", model="m")
    for header in (None, "", "nonsense", "00-0-0-01", CALLER.replace("00-4", "ff-4")):
        with traces.request(header) as request:
            assert request.traceparent is not None
            assert trace_id_of(request.traceparent) != TRACE
            request.ended("GET", "/x", 503)
    traces.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == 5
    assert all(span.parent is None and span.attributes["error.type"] == "503" for span in spans)


def test_an_unsampled_caller_stays_unsampled_in_the_worker() -> None:
    exporter = InMemorySpanExporter()
    traces = traces_to(SimpleSpanProcessor(exporter), process="api", model="m")
    with traces.request(CALLER[:-2] + "00") as request:
        carried = request.traceparent
    assert carried is not None
    assert trace_id_of(carried) == TRACE
    traces.stage("prefill", carried, 1.0, 2.0)
    traces.close()
    assert exporter.get_finished_spans() == ()


def test_off_means_nothing_imported_and_nothing_carried() -> None:
    """FastAPI itself imports OpenTelemetry's API, which does nothing without an SDK."""
    code = (
        "import sys; from service.traces import open_traces; import service.app, service.worker;"
        "traces = open_traces(None, process='api', model='m')\n"
        f"with traces.request({CALLER!r}) as request:\n"
        " assert request.traceparent is None; request.ended('GET', '/', 500)\n"
        "traces.stage('prefill', None, 0.0, 1.0, {'a': 1}); traces.close()\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_wanted_without_the_extra_is_refused_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracesUnavailable, match=r"foreword\[otel\]"):
        open_traces("http://127.0.0.1:4318", process="api", model="m")
