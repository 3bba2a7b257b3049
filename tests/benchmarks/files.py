"""Files out and in: downloads, multipart uploads, archives, listings, and all of it at once."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import create_engine

from app.settings import load_settings
from app.store.migrations import migrate
from app.store.session_tables import files, sessions
from app.store.tables import blobs
from tests.benchmarks import peers
from tests.benchmarks.large import MIB, make_body, nobody, peak_memory, send, upload
from tests.benchmarks.table import Row

RUNS = int(os.environ.get("BENCH_RUNS", "3"))
BUFFER = 1 << 20
WARM_UP_SECONDS = 1
TOGETHER_SECONDS = 4
"""How long downloads and uploads are watched beside each other, after they have begun."""


@dataclass
class Client:
    """The API, as little as this needs of it."""

    url: str

    def call(self, method: str, path: str, document: object = None) -> Any:
        """One JSON request."""
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"{self.url}/v1{path}", body, method=method)
        request.add_header("Authorization", f"Bearer {peers.TOKEN}")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def put(self, container: str, path: str, body: Path, digest: str) -> Any:
        """Put one artifact; gives its object."""
        head = (
            f"Content-Type: application/octet-stream\r\nAHP-Content-SHA256: {digest}\r\n"
            f"Authorization: Bearer {peers.TOKEN}\r\n"
        )
        target = f"{self.url}/v1/containers/{container}/files/{path}"
        if send(target, "PUT", head, body) != 201:
            raise RuntimeError(f"{target} did not take the artifact")

    def artifact(self, session: Any) -> str:
        """The path of the newest artifact's bytes."""
        listed = self.call("GET", f"/sessions/{session['id']}/files")["files"][-1]
        return f"/v1/containers/{listed['container_id']}/files/{listed['id']}/content"


def measure(folder: Path) -> list[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        rows = [
            *_downloads(folder / "downloads", Path(memory)),
            _multipart(folder / "multipart", Path(memory)),
            _archive_of_large(folder / "large", Path(memory)),
            _archive_of_small(folder / "small", Path(memory)),
            _mixed(folder / "mixed", Path(memory)),
        ]
    return [*rows, *_listings(folder / "listings")]


def fetch(
    url: str, *, token: str | None = peers.TOKEN, passed: Callable[[int], object] = nobody
) -> tuple[int, float]:
    """Read a whole answer and drop it: its octets, and the seconds to the first of them."""
    parts = urlsplit(url)
    head = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    if token is not None:
        head += f"Authorization: Bearer {token}\r\n"
    started = time.perf_counter()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head.encode() + b"\r\n")
        buffer = bytearray(BUFFER)
        count = connection.recv_into(buffer)
        first = time.perf_counter() - started
        if not buffer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{url} answered {bytes(buffer[:60])!r}")
        total = count - buffer.index(b"\r\n\r\n") - 4
        while count := connection.recv_into(buffer):
            total += count
            passed(count)
    return total, first


def _rate(size: int, work: partial[Any]) -> float:
    started = time.perf_counter()
    work()
    return size / MIB / (time.perf_counter() - started)


def _downloads(folder: Path, memory: Path) -> list[Row]:
    """nginx sends the very file that Consignee stored: how a file was written tells in reading."""
    folder.mkdir()
    direct = Row("download of 1 GiB, direct", "MiB/s")
    accelerated = Row("the same through nginx with X-Accel-Redirect", "MiB/s")
    content, digest = make_body(memory / "download", 1024 * MIB)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(peers.consignee(folder))
        client = Client(ours.url)
        session = client.call("POST", "/sessions", {})
        client.put(session["container_id"], "body.bin", content, digest)
        content.unlink()
        path = client.artifact(session)
        nginx = stack.enter_context(_static_nginx(folder))
        idle = peers.resident_bytes(ours.process.pid)
        for _ in range(RUNS + 1):
            direct.add("nginx", _rate(1024 * MIB, partial(fetch, nginx, token=None)))
            with peak_memory(ours.process.pid) as peak:
                direct.add("consignee", _rate(1024 * MIB, partial(fetch, ours.url + path)))
            direct.add("consignee's memory over idle, MiB", (peak[0] - idle) / MIB)
    with _accelerating(folder) as (front, plain):
        for _ in range(RUNS + 1):
            accelerated.add("nginx", _rate(1024 * MIB, partial(fetch, plain, token=None)))
            work = partial(fetch, front + path)
            accelerated.add("consignee behind nginx", _rate(1024 * MIB, work))
    direct.judge("of nginx", direct.median("consignee") / direct.median("nginx"), least=0.5)
    over = direct.median("consignee's memory over idle, MiB")
    direct.judge("memory over idle, MiB", over, most=64)
    ratio = accelerated.median("consignee behind nginx") / accelerated.median("nginx")
    accelerated.judge("of nginx", ratio, least=0.95)
    return [direct, accelerated]


def _stored_file(folder: Path) -> str:
    """The one large body, as a path below the folder of bodies."""
    root = folder / "data" / "blobs"
    (path,) = (path for path in root.glob("*/*") if path.stat().st_size == 1024 * MIB)
    return str(path.relative_to(root))


def _nginx(folder: Path, server: str) -> contextlib.AbstractContextManager[int]:
    folder.mkdir()
    port = peers.free_port()
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"{user} daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
        f"http {{ access_log off; sendfile on; {temporary} server {{ listen 127.0.0.1:{port};"
        f"client_max_body_size 0; {server} }} }}"
    )
    (folder / "port").write_text(str(port))
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    return peers.started([binary, "-p", str(folder), "-c", str(configuration)], port)


@contextlib.contextmanager
def _static_nginx(folder: Path) -> Iterator[str]:
    with _nginx(folder / "static", f"root {folder}/data/blobs;"):
        port = (folder / "static" / "port").read_text()
        yield f"http://127.0.0.1:{port}/{_stored_file(folder)}"


@contextlib.contextmanager
def _accelerating(folder: Path) -> Iterator[tuple[str, str]]:
    """Consignee behind nginx, and the stored file as nginx serves it by itself."""
    configuration = folder / "consignee.toml"
    peers.write_configuration(configuration, 'accel = "nginx"')
    with peers.consignee(folder) as ours:
        stored = f"alias {folder}/data/blobs/; etag off;"
        server = (
            f"location / {{ proxy_pass {ours.url}; proxy_http_version 1.1; proxy_buffering off; }}"
            f"location /_consignee/blobs/ {{ internal; {stored} }}"
            f"location /plain/ {{ {stored} }}"
        )
        with _nginx(folder / "front", server):
            front = f"http://127.0.0.1:{(folder / 'front' / 'port').read_text()}"
            yield front, f"{front}/plain/{_stored_file(folder)}"


def _multipart(folder: Path, memory: Path) -> Row:
    folder.mkdir()
    row = Row("multipart upload of 1 GiB", "MiB/s")
    content, digest = make_body(memory / "multipart", 1024 * MIB)
    form = memory / "form"
    boundary = "consignee-benchmark"
    part = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="body.bin"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    with form.open("wb") as target, content.open("rb") as source:
        target.write(part.encode())
        shutil.copyfileobj(source, target, BUFFER)
        target.write(f"\r\n--{boundary}--\r\n".encode())
    head = (
        f"Content-Type: multipart/form-data; boundary={boundary}\r\n"
        f"Authorization: Bearer {peers.TOKEN}\r\n"
    )
    with peers.consignee(folder) as ours:
        target_url = f"{ours.url}/v1/files"
        for _ in range(RUNS):
            plain = partial(upload, ours.upload_endpoint, content, digest)
            row.add("the AHP upload", _rate(1024 * MIB, plain))
            row.add("multipart", _rate(1024 * MIB, partial(send, target_url, "POST", head, form)))
    content.unlink()
    form.unlink()
    row.judge(
        "of the AHP upload", row.median("multipart") / row.median("the AHP upload"), least=0.8
    )
    return row


def _archive_of_large(folder: Path, memory: Path) -> Row:
    folder.mkdir()
    row = Row("archive of 40 files, 1 GiB together", "MiB/s")
    size = 1024 * MIB // 40 // MIB * MIB
    with peers.consignee(folder) as ours:
        client = Client(ours.url)
        one, many = client.call("POST", "/sessions", {}), client.call("POST", "/sessions", {})
        whole, digest = make_body(memory / "whole", 40 * size)
        client.put(one["container_id"], "whole.bin", whole, digest)
        whole.unlink()
        for number in range(40):
            piece, digest = make_body(memory / "piece", size)
            client.put(many["container_id"], f"part-{number:02}.bin", piece, digest)
        archive = f"{ours.url}/v1/sessions/{many['id']}/files/archive"
        direct = ours.url + client.artifact(one)
        idle = peers.resident_bytes(ours.process.pid)
        for _ in range(RUNS):
            row.add("direct download", _rate(40 * size, partial(fetch, direct)))
            with peak_memory(ours.process.pid) as peak:
                row.add("archive", _rate(40 * size, partial(fetch, archive)))
            row.add("memory over idle, MiB", (peak[0] - idle) / MIB)
            row.add("first byte, ms", fetch(archive)[1] * 1000)
    row.judge(
        "of the direct download", row.median("archive") / row.median("direct download"), least=0.7
    )
    row.judge("memory over idle, MiB", row.median("memory over idle, MiB"), most=64)
    row.judge("first byte, s", row.median("first byte, ms") / 1000, most=1.0)
    return row


def _archive_of_small(folder: Path, memory: Path) -> Row:
    folder.mkdir()
    row = Row("archive of 10,000 files of 1 KiB", "s")
    source = memory / "small"
    source.mkdir()
    for number in range(10_000):
        (source / f"{number:05}.bin").write_bytes(os.urandom(1024))
    with peers.consignee(folder) as ours:
        client = Client(ours.url)
        session = client.call("POST", "/sessions", {})
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(partial(_put_small, client, session), sorted(source.iterdir())))
        archive = f"{ours.url}/v1/sessions/{session['id']}/files/archive"
        for _ in range(RUNS):
            started = time.perf_counter()
            subprocess.run(
                ["zip", "-0", "-r", "-q", str(memory / "peer.zip"), "."], cwd=source, check=True
            )
            row.add("zip -0 -r", time.perf_counter() - started)
            (memory / "peer.zip").unlink()
            started = time.perf_counter()
            row.add("first byte", fetch(archive)[1])
            row.add("archive", time.perf_counter() - started)
    row.judge("times zip", row.median("archive") / row.median("zip -0 -r"), most=3.0)
    row.judge("first byte, s", row.median("first byte"), most=1.0)
    return row


def _put_small(client: Client, session: Any, path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    client.put(session["container_id"], path.name, path, digest)


def _mixed(folder: Path, memory: Path) -> Row:
    folder.mkdir()
    row = Row("16 downloads while 8 uploads run, 64 MiB each", "MiB/s")
    content, digest = make_body(memory / "mixed", 64 * MIB)
    with peers.consignee(folder) as ours:
        client = Client(ours.url)
        session = client.call("POST", "/sessions", {})
        client.put(session["container_id"], "body.bin", content, digest)
        down = partial(fetch, ours.url + client.artifact(session))
        up = partial(upload, ours.upload_endpoint, content, digest)
        for _ in range(RUNS):
            row.add("downloads alone", _together([down] * 16))
            row.add("uploads alone", _together([up] * 8))
            with _healthz(ours.url) as waits:
                row.add("together", _together([*([down] * 16), *([up] * 8)]))
            row.add("p99 of /healthz, ms", statistics.quantiles(waits, n=100)[98] * 1000)
    better = max(row.median("downloads alone"), row.median("uploads alone"))
    row.judge("of the better one alone", row.median("together") / better, least=0.8)
    row.judge("p99 of /healthz, ms", row.median("p99 of /healthz, ms"), most=100)
    return row


def _together(works: list[partial[Any]]) -> float:
    """MiB/s that all works together pass, each of them again and again, while every one runs.

    Where each ran once, or until its last one was done, a part of what is measured would be the
    slower ones by themselves.
    """
    counts = [0] * len(works)
    ended = threading.Event()

    def repeat(number: int) -> None:
        def passed(count: int) -> None:
            counts[number] += count

        while not ended.is_set():
            works[number](passed=passed)

    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(repeat, number) for number in range(len(works))]
        time.sleep(WARM_UP_SECONDS)
        before, started = sum(counts), time.perf_counter()
        time.sleep(TOGETHER_SECONDS)
        rate = (sum(counts) - before) / MIB / (time.perf_counter() - started)
        ended.set()
    for work in running:
        work.result()
    return rate


@contextlib.contextmanager
def _healthz(url: str) -> Iterator[list[float]]:
    waits: list[float] = []
    ended = threading.Event()
    parts = urlsplit(url)

    def ask() -> None:
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        while not ended.wait(0.01):
            started = time.perf_counter()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            waits.append(time.perf_counter() - started)
        connection.close()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield waits
    finally:
        ended.set()
        asking.join()


def _listings(folder: Path) -> list[Row]:
    folder.mkdir()
    sessions_row = Row("listing sessions, a page of 20", "ms, p95 of 200")
    files_row = Row("listing the files of a session", "ms, p95 of 200")
    for name, count in (("at 1,000 sessions", 1_000), ("at 100,000 sessions", 100_000)):
        place = folder / str(count)
        place.mkdir()
        fill_sessions(place / "data", count)
        with peers.consignee(place) as ours:
            session = f"hsess_{count // 2:032x}"
            for _ in range(RUNS):
                sessions_row.add(name, p95(f"{ours.url}/v1/sessions"))
                files_row.add(name, p95(f"{ours.url}/v1/sessions/{session}/files"))
    for row in (sessions_row, files_row):
        ratio = row.median("at 100,000 sessions") / row.median("at 1,000 sessions")
        row.judge("the larger, of the smaller", ratio, most=1.5)
    return [sessions_row, files_row]


def p95(url: str) -> float:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    spans = []
    for _ in range(200):
        started = time.perf_counter()
        connection.request("GET", parts.path, headers={"Authorization": f"Bearer {peers.TOKEN}"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}")
        spans.append(time.perf_counter() - started)
    connection.close()
    return statistics.quantiles(spans, n=20)[18] * 1000


def fill_sessions(data: Path, count: int) -> None:
    """Sessions with two files each, made up in the database: what counts is their number."""
    migrate(load_settings(data_dir=data))
    engine = create_engine(f"sqlite:///{data / 'consignee.db'}")
    digest = hashlib.sha256(b"x").digest()
    with engine.begin() as connection:
        connection.execute(
            blobs.insert(), [{"digest": digest, "size": 1, "data": b"x", "created_at": 1}]
        )
        for start in range(0, count, 5_000):
            numbers = range(start, min(start + 5_000, count))
            connection.execute(sessions.insert(), [session_row(number) for number in numbers])
            connection.execute(
                files.insert(),
                [file_row(number, index, digest) for number in numbers for index in range(2)],
            )
    engine.dispose()


def session_row(number: int) -> dict[str, Any]:
    return {
        "session_id": f"hsess_{number:032x}", "container_id": f"cntr_{number:032x}",
        "scope": "bench", "principal": "bench", "status": "active", "created_at": 1,
        "updated_at": 1, "files": 2, "bytes": 2,
    }  # fmt: skip


def file_row(number: int, index: int, digest: bytes) -> dict[str, Any]:
    return {
        "file_id": f"file_{number * 2 + index:032x}", "scope": "bench", "principal": "bench",
        "session_id": f"hsess_{number:032x}", "container_id": f"cntr_{number:032x}",
        "filename": f"{index}.txt", "path": f"{index}.txt", "media_type": "text/plain",
        "kind": "artifact", "digest": digest, "size": 1, "current": 1, "created_at": 1,
    }  # fmt: skip


def missing() -> str | None:
    """Why this cannot be measured here."""
    if not (shutil.which("nginx") or Path("/usr/sbin/nginx").exists()):
        return "nginx is not installed"
    return None if shutil.which("zip") else "zip is not installed"
