"""A mirror of a model hub on this machine: its interface as huggingface_hub asks it, with a count of what it sent."""

import contextlib
import hashlib
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"
LARGE = ".safetensors"
"""How the names of files end that a hub keeps in LFS, under their SHA-256."""
_PIECE = 2**16


@dataclass
class Mirror:
    """One repository, of a commit that `main` and `v1` name."""

    model: str
    files: dict[str, bytes]
    damaged: set[str] = field(default_factory=set)
    """Names of files that come with another last byte than they have."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Bytes after which the next connection with that file breaks, once."""
    hold_after: dict[str, float] = field(default_factory=dict)
    """Bytes after which that file stops coming, and `held` is set, until it is removed here."""
    held: threading.Event = field(default_factory=threading.Event)
    refusal: tuple[int, str] | None = None
    """Status and X-Error-Code of every answer."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes sent, by file."""
    url: str = ""

    def etag(self, name: str) -> str:
        content = self.files[name]
        if name.endswith(LARGE):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def tree(self) -> list[dict[str, object]]:
        return [self._entry(name) for name in self.files]

    def _entry(self, name: str) -> dict[str, object]:
        size, oid = len(self.files[name]), self.etag(name)
        entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": oid}
        if name.endswith(LARGE):
            entry |= {"oid": 40 * "1", "lfs": {"oid": oid, "size": size, "pointerSize": 134}}
        return entry


@contextlib.contextmanager
def mirroring(model: str, files: dict[str, bytes]) -> Iterator[Mirror]:
    mirror = Mirror(model, files)

    class Handler(_Handler):
        pass

    Handler.mirror = mirror
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        mirror.url = f"http://127.0.0.1:{server.server_port}"
        yield mirror
        mirror.hold_after.clear()
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    mirror: Mirror
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        mirror, path = self.mirror, unquote(urlsplit(self.path).path).lstrip("/")
        if mirror.refusal is not None:
            self._answer(mirror.refusal[0], b"{}", {"X-Error-Code": mirror.refusal[1]})
        elif path.startswith(f"api/models/{mirror.model}/"):
            what, revision = path.removeprefix(f"api/models/{mirror.model}/").split("/", 1)
            if revision not in ("main", "v1", COMMIT):
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                siblings = [{"rfilename": name} for name in mirror.files]
                told = mirror.tree() if what == "tree" else {"id": mirror.model, "sha": COMMIT, "siblings": siblings}
                self._answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"{mirror.model}/resolve/{COMMIT}/"):
            self._file(path.removeprefix(f"{mirror.model}/resolve/{COMMIT}/"))
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, name: str) -> None:
        mirror, content = self.mirror, self.mirror.files[name]
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if "Range" in self.headers else 200)
        facts = {"ETag": f'"{mirror.etag(name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        facts |= {"Content-Length": str(len(content) - begin)}
        if begin:
            facts |= {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        if name.endswith(LARGE):
            facts |= {"X-Linked-Etag": f'"{mirror.etag(name)}"', "X-Linked-Size": str(len(content))}
        for each, value in facts.items():
            self.send_header(each, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in mirror.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        end = begin + mirror.cut_after.pop(name) if name in mirror.cut_after else len(content)
        with contextlib.suppress(ConnectionError):
            for first in range(begin, end, _PIECE):
                piece = content[first : min(first + _PIECE, end)]
                self.wfile.write(piece)
                mirror.num_bytes[name] += len(piece)
                while mirror.num_bytes[name] >= mirror.hold_after.get(name, math.inf):
                    mirror.held.set()
                    threading.Event().wait(0.02)
        self.close_connection = end < len(content)
