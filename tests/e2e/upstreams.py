"""A stand-in for the receiver that writes down, octet by octet, what a proxy makes of a request."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

ANSWER = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
PIECE = 64 * 1024


class RecordingUpstream(socketserver.ThreadingTCPServer):
    """Answers every upload with 201 once it has all of it, and never closes a connection."""

    daemon_threads = True
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Recorder)
        self.heads: Queue[bytes] = Queue()
        """The heads of requests as they arrived, without the empty line."""
        self.bodies: Queue[bytes] = Queue()
        """The bodies of requests, piece by piece as they arrived."""
        self.ended: Queue[int] = Queue()
        """For each connection that was closed by the other side: the requests that it brought."""

    @property
    def address(self) -> str:
        """HOST:PORT"""
        return f"127.0.0.1:{self.server_address[1]}"


class _Recorder(socketserver.StreamRequestHandler):
    server: RecordingUpstream

    def handle(self) -> None:
        requests = 0
        while self._answer():
            requests += 1
        self.server.ended.put(requests)

    def _answer(self) -> bool:
        """Answer the next request; False where there is no other, or no end of its body."""
        head = self._head()
        if not head:
            return False
        self.server.heads.put(head)
        missing = content_length(head)
        while missing and (piece := self.rfile.read1(min(PIECE, missing))):
            missing -= len(piece)
            self.server.bodies.put(piece)
        if not missing:
            self.wfile.write(ANSWER)
        return not missing

    def _head(self) -> bytes:
        head = b""
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            head += line
        return head


def headers_of(head: bytes) -> list[tuple[str, str]]:
    """Names in lower case, and values, in order."""
    lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    return [(name.lower(), value.strip()) for name, _, value in pairs]


def content_length(head: bytes) -> int:
    """The declared length; 0 where there is none."""
    return int(dict(headers_of(head)).get("content-length", "0"))


@contextmanager
def recording_upstream() -> Iterator[RecordingUpstream]:
    """Run one until the block ends."""
    with RecordingUpstream() as upstream:
        thread = threading.Thread(target=upstream.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield upstream
        finally:
            upstream.shutdown()
            thread.join()
