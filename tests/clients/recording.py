"""A proxy between clients and the gateway that keeps what they ask, method, path and body, and the answer's status; no
header, and so no key.
"""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MADE_ID = re.compile(r"\b(call|chatcmpl|cmpl|fc|msg|resp|rs)[_-][0-9a-f]{16,}")
PIECE = 1 << 16
REPOSITORY = Path(__file__).parents[2]


class Recording(ThreadingHTTPServer):
    """Hold the requests that came, each once and in their order. Ids that the gateway made are numbered."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.upstream = upstream.removeprefix("http://")
        self.requests: list[Any] = []
        self._ids: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, method: str, path: str, body: bytes, status: int) -> None:
        text = body.decode().replace(f"{REPOSITORY}/", "")  # of the model's id
        text = MADE_ID.sub(lambda found: self._ids.setdefault(found[0], f"{found[1]}_{len(self._ids)}"), text)
        asked = {"method": method, "path": path, "status": status, "body": json.loads(text) if text else None}
        if asked not in self.requests:
            self.requests.append(asked)


class _Forward(BaseHTTPRequestHandler):
    server: Recording
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._forward(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._forward(body)

    def _forward(self, body: bytes) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        if self.command == "POST":
            self.server.add(self.command, self.path, body, answer.status)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("connection", "close")  # which ends the body, whole or streamed
        self.end_headers()
        while piece := answer.read1(PIECE):
            self.wfile.write(piece)
            self.wfile.flush()
        upstream.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def recording(upstream: str) -> Iterator[Recording]:
    """Run the proxy in a thread of its own."""
    made = Recording(upstream)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
