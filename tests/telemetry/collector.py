"""A collector that tests look into: OTLP over gRPC and over HTTP, as real servers on real ports."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

GRPC, HTTP = "grpc", "http/protobuf"
KINDS = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_CLIENT: "client", Span.SPAN_KIND_INTERNAL: "internal"}


class Collector:
    """What has come so far. `refuse`: it takes nothing."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.endpoint = ""
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.refuse = False

    @property
    def settings(self) -> dict[str, str]:
        return {"otlp_endpoint": self.endpoint, "otlp_protocol": self.protocol}

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        self.headers.append(headers)
        self.requests.append(request)

    @property
    def spans(self) -> list[Span]:
        groups = (group for request in self.requests for group in request.resource_spans)
        return [span for group in groups for scope in group.scope_spans for span in scope.spans]

    @property
    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)

    def named(self, name: str) -> Span:
        """The only span of this name."""
        (found,) = (span for span in self.spans if span.name == name)
        return found

    def tree(self) -> dict[str, list[str]]:
        """The names of the spans below each one that has some; "" is above those whose parent is not here."""
        names = {span.span_id: span.name for span in self.spans}
        below: dict[str, list[str]] = {}
        for span in sorted(self.spans, key=lambda one: (one.start_time_unix_nano, one.name)):
            below.setdefault(names.get(span.parent_span_id, ""), []).append(span.name)
        return below


def attributes(of: Any) -> dict[str, Any]:
    """Those of a span, of an event or of a resource."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@contextlib.contextmanager
def collecting(protocol: str) -> Iterator[Collector]:
    """A collector that is there until the end of the block."""
    found = Collector(protocol)
    with _over_grpc(found) if protocol == GRPC else _over_http(found):
        yield found


@contextlib.contextmanager
def _over_grpc(collector: Collector) -> Iterator[None]:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            if collector.refuse:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")
            collector.take(request, dict(context.invocation_metadata()))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def _over_http(collector: Collector) -> Iterator[None]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            here = self.path == "/v1/traces" and not collector.refuse
            if here:
                request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                collector.take(request, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(200 if here else 401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
