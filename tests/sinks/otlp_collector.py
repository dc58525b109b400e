"""An OTLP/HTTP collector on this machine that decodes what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class Collector:
    """Requests in order; `status` is what the next one is answered."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.heads: list[tuple[str, dict[str, str]]] = []
        self.status = 200
        self.url = ""

    def metrics(self) -> dict[str, Any]:
        """The metrics of the last request by name."""
        (resource,) = self.requests[-1].resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: metric for metric in scope.metrics}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.heads.append((self.path, dict(self.headers)))
            collector.requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
