"""An isolated cache, a server on loopback, and no way out of it."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tacit.data.catalogue import DataFile

REAL_DATA = os.environ.get("TACIT_DATA")


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    """Every test has its own cache and sees no TACIT_DATA, proxy or host but loopback."""
    for name in ("TACIT_DATA", "TACIT_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    connect = socket.create_connection

    def loopback_only(address, *args, **kwargs):
        if address[0] != "127.0.0.1":
            raise AssertionError(f"a test reached for {address[0]}")
        return connect(address, *args, **kwargs)

    monkeypatch.setattr(socket, "create_connection", loopback_only)


@pytest.fixture
def real_data(monkeypatch):
    """The folder of real datasets, or a skip."""
    if not REAL_DATA:
        pytest.skip("TACIT_DATA is not set: no real datasets to read")
    monkeypatch.setenv("TACIT_DATA", REAL_DATA)
    return REAL_DATA


@dataclass
class Answer:
    """How the server answers. `sent` bytes of the body go out, then it closes, waits or resets."""

    body: bytes = b""
    status: int = 200
    sent: int | None = None
    declare_length: bool = True
    then_wait: bool = False
    then_reset: bool = False


class Loopback:
    """A server on loopback that can be told to misbehave."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.hits: list[str] = []
        self.half_sent = threading.Event()
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.hits.append(self.path)
                answer = outer.answers.get(self.path, Answer(status=404))
                self.send_response(answer.status)
                if answer.declare_length:
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body[: answer.sent])
                self.wfile.flush()
                if answer.then_wait:
                    outer.half_sent.set()
                    outer.release.wait(20)
                if answer.then_reset:
                    linger = struct.pack("ii", 1, 0)
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.connection.close()
                self.close_connection = True

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that hangs up is expected here
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{path}"

    def offer(self, name: str, body: bytes, **kwargs) -> DataFile:
        """Serve `body` under /name, and the catalogue's description of it."""
        self.answers[f"/{name}"] = Answer(body, **kwargs)
        return DataFile(name, hashlib.sha256(body).hexdigest(), len(body), (self.url(f"/{name}"),))

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)


@pytest.fixture
def loopback():
    server = Loopback()
    yield server
    server.close()
