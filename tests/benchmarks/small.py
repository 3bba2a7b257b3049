"""Small uploads under load: 4 KiB, 16 connections, distinct bodies, full durability."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.benchmarks import peers
from tests.benchmarks.table import Row

SECONDS = int(os.environ.get("BENCH_SECONDS", "5"))
RUNS = int(os.environ.get("BENCH_RUNS", "3"))
REQUESTS = 30_000
BODY_BYTES = 4096

SCRIPT = """
local requests = {}
local file = io.open("REQUESTS", "rb")
local size = tonumber(file:read("*l"))
while true do
  local request = file:read(size)
  if request == nil or #request < size then break end
  requests[#requests + 1] = request
end
local next_one = 0
request = function()
  next_one = next_one % #requests + 1
  return requests[next_one]
end
done = function(summary)
  io.write("ERRORS " .. summary.errors.status .. " " .. summary.errors.read .. "\\n")
end
"""


BARE = "bare uvicorn application, as it comes"
SILENT = "the same without its access log"
SDK = "the SDK's receiver, file and fsync"


def measure(folder: Path) -> list[Row]:
    """Both rows: configured token, and JWT.

    The bare application logs its requests as uvicorn does when nothing is said, and so does
    Consignee; what it does without is shown beside.
    """
    token_row = Row("4 KiB uploads, 16 connections, configured token, durable", "requests/s")
    jwt_row = Row("the same with a JWT", "requests/s")
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(peers.bare(folder, logs_requests=True))
        silent = stack.enter_context(peers.bare(folder))
        sdk = stack.enter_context(peers.sdk(folder))
        issuer, token = stack.enter_context(_issuer())
        peers.write_configuration(folder / "consignee.toml", _issuer_table(issuer))
        ours = stack.enter_context(peers.consignee(folder))
        for _ in range(RUNS):
            token_row.add(BARE, load(bare, peers.TOKEN))
            token_row.add(SILENT, load(silent, peers.TOKEN))
            token_row.add(SDK, load(sdk, peers.TOKEN))
            token_row.add("consignee", load(ours.upload_endpoint, peers.TOKEN))
            jwt_row.add(BARE, load(bare, token))
            jwt_row.add("consignee", load(ours.upload_endpoint, token))
    _judge(token_row, jwt_row)
    return [token_row, jwt_row]


def _judge(token_row: Row, jwt_row: Row) -> None:
    ours = token_row.median("consignee")
    token_row.judge("of the bare application", ours / token_row.median(BARE), least=0.18)
    token_row.judge("times the SDK's receiver", ours / token_row.median(SDK), least=20)
    ratio = jwt_row.median("consignee") / jwt_row.median(BARE)
    jwt_row.judge("of the bare application", ratio, least=0.15)


def load(url: str, token: str) -> float:
    """Requests a second that a server takes of distinct small uploads; all must be confirmed."""
    return drive(url, _uploads(urlsplit(url).path, token))


def drive(url: str, requests: Iterable[bytes], *, once: bool = False) -> float:
    """Requests a second that a server takes of `requests`, all of one length; none may fail.

    With `once` there must be enough of them that none is sent twice.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "requests"
        count = _write_requests(path, requests)
        script = Path(folder) / "load.lua"
        script.write_text(SCRIPT.replace("REQUESTS", str(path)))
        wrk = ["wrk", "-t1", "-c16", f"-d{SECONDS}s", "-s", str(script), url]
        output = subprocess.run(wrk, capture_output=True, text=True, check=True).stdout
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", output)
    errors = re.search(r"ERRORS (\d+) (\d+)", output)
    if rate is None or errors is None or errors.groups() != ("0", "0"):
        raise RuntimeError(f"the load did not run cleanly:\n{output}")
    if once and float(rate[1]) * SECONDS > count:
        raise RuntimeError(f"{url} took more than the {count} requests that there are")
    return float(rate[1])


def _write_requests(path: Path, requests: Iterable[bytes]) -> int:
    count = 0
    with path.open("wb") as file:
        for request in requests:
            if not count:
                file.write(b"%d\n" % len(request))
            file.write(request)
            count += 1
    return count


def _uploads(target: str, token: str) -> Iterator[bytes]:
    head = (
        f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {BODY_BYTES}\r\n"
        "AHP-Content-SHA256: "
    ).encode()
    for _ in range(REQUESTS):
        body = os.urandom(BODY_BYTES)
        yield head + hashlib.sha256(body).hexdigest().encode() + b"\r\n\r\n" + body


def _issuer_table(issuer: str) -> str:
    return (
        f'\n[[issuers]]\nissuer = "{issuer}"\naudience = ["bench"]\n'
        f'jwks_url = "{issuer}/jwks"\npermissions_from = "scope"\n'
    )


@contextlib.contextmanager
def _issuer() -> Iterator[tuple[str, str]]:
    """A key set on loopback, and one token signed with its key."""
    key = RSAKey.generate_key(2048, {"kid": "bench", "alg": "RS256", "use": "sig"})
    document = json.dumps({"keys": [key.as_dict(private=False)]}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    issuer = f"http://127.0.0.1:{server.server_port}"
    now = int(time.time())
    claims = {
        "iss": issuer, "sub": "bench", "aud": "bench", "iat": now, "exp": now + 3600,
        "client_id": "bench", "jti": "bench", "scope": "ahp.upload",
    }  # fmt: skip
    header = {"alg": "RS256", "kid": "bench", "typ": "at+jwt"}
    try:
        yield issuer, jwt.encode(header, claims, key)
    finally:
        server.shutdown()
        server.server_close()


def missing() -> str | None:
    """Why this cannot be measured here."""
    return None if shutil.which("wrk") else "wrk is not installed"
