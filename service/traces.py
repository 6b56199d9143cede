"""Traces by OpenTelemetry (the extra `otel`): one trace from an API request through its jobs to the worker.

Off unless FOREWORD_OTLP_ENDPOINT is set: no SDK is imported then and `traceparent` goes unread. Spans
are named by their stage and made when the stage is over, since a worker does many things by turns. Attributes are those
of the GenAI semantic conventions and `foreword.*`; no text of documents, questions or answers is among them.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

EXPORT_EVERY_MS = 1000
EXPORT_TIMEOUT_S = 5

Attributes = Mapping[str, Any]


class TracesUnavailable(Exception):
    """Traces were asked for, and OpenTelemetry isn't installed."""

    code = "traces_unavailable"


class RequestTrace:
    """The span of one API request. `traceparent` is what its jobs carry; None while traces are off."""

    def __init__(self, span: "Span | None" = None, traceparent: str | None = None) -> None:
        self._span = span
        self.traceparent = traceparent

    def ended(self, method: str, route: str, status: int) -> None:
        """`status` 0: the client went away first."""
        if self._span is None:
            return
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes({"http.request.method": method, "http.route": route})
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._fail(str(status))

    def _fail(self, kind: str) -> None:
        from opentelemetry.trace import StatusCode

        assert self._span is not None
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)


class Traces:
    """Does nothing unless it is given a tracer."""

    def __init__(self, tracer: "Tracer | None" = None, *, model: str = "", shutdown: Any = lambda: None) -> None:
        self._tracer = tracer
        self._model = model
        self.close = shutdown

    @property
    def on(self) -> bool:
        return self._tracer is not None

    @contextmanager
    def request(self, traceparent: str | None) -> Iterator[RequestTrace]:
        """Around one API request, whose header `traceparent` may continue the caller's trace."""
        if self._tracer is None:
            yield RequestTrace()
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._tracer.start_span("request", context=_context(traceparent), kind=SpanKind.SERVER)
        try:
            yield RequestTrace(span, _traceparent(set_span_in_context(span)))
        finally:
            span.end()

    def stage(
        self,
        stage: str,
        traceparent: str | None,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """A stage that is over, in unix seconds; `error`: the code it ended with. Attributes of None are left out."""
        if self._tracer is None:
            return
        from opentelemetry.trace import StatusCode

        named = {"foreword.stage": stage, "gen_ai.provider.name": "foreword", "gen_ai.request.model": self._model}
        given = {name: value for name, value in (attributes or {}).items() if value is not None}
        span = self._tracer.start_span(
            stage, context=_context(traceparent), start_time=_nanoseconds(start_s), attributes={**named, **given}
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(max(start_s, end_s)))


def open_traces(endpoint: str | None, *, process: str, model: str) -> Traces:
    """`endpoint` is an OTLP/HTTP collector's address, as http://127.0.0.1:4318; None: no traces.

    `process` is api or worker. Raises TracesUnavailable.
    """
    if endpoint is None:
        return Traces()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesUnavailable(
            f"FOREWORD_OTLP_ENDPOINT is set, but {error.name} is not installed: pip install 'foreword[otel]'"
        ) from error
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS)
    log.info("traces go to %s", endpoint)
    return traces_to(processor, process=process, model=model)


def traces_to(processor: "SpanProcessor", *, process: str, model: str) -> Traces:
    """Traces whose spans `processor` gets."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create(
        {
            "service.name": "foreword",
            "service.version": version("foreword"),
            "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
            "foreword.process": process,
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Traces(provider.get_tracer("foreword"), model=model, shutdown=provider.shutdown)


def trace_id_of(traceparent: str | None) -> str | None:
    """For log lines."""
    return traceparent.split("-")[1] if traceparent else None


def _context(traceparent: str | None) -> Any:
    """A malformed header is no parent: the propagator says so itself."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent} if traceparent else {}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _traceparent(context: Any) -> str | None:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=context)
    return carrier.get("traceparent")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
