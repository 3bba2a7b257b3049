"""The worker processes of `serve`: what each does, and what their parent does around them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import main
from app.commands import workers as workers_module
from app.commands.supervision import RETIRE, SERVING, Plan, StartFailed
from app.commands.workers import Crew, run_workers, work
from app.http.metrics import SHARED_VARIABLE
from app.server import bind, reachable_url
from app.settings import Settings, SettingsError
from app.store import migrate
from tests.backends import settings_of

SECONDS = 60.0


def settings_in(folder: Path, **given: Any) -> Settings:
    made = Settings(data_dir=folder, **settings_of(folder), **given)
    migrate(made)
    return made


def worked(settings: Settings, parent: Callable[[Connection, str], None]) -> None:
    """A worker in this thread, with its parent in another."""
    link, theirs = Pipe()
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            assert link.poll(SECONDS)
            assert link.recv() == SERVING
            parent(link, url)
        except BaseException as error:
            failures.append(error)
        finally:
            link.close()

    with bind("127.0.0.1", 0) as listener, theirs:
        url = reachable_url(listener, tls=False)
        thread = threading.Thread(target=guarded)
        thread.start()
        work(settings, listener, theirs)
        thread.join(SECONDS)
    assert failures == []


def test_a_worker_serves_until_its_parent_is_gone(tmp_path: Path) -> None:
    answers = []

    def parent(_: Connection, url: str) -> None:
        answers.append(httpx.get(f"{url}/healthz", trust_env=False).status_code)

    worked(settings_in(tmp_path), parent)
    assert answers == [200]


def test_a_worker_retires_when_it_is_told(tmp_path: Path) -> None:
    def parent(link: Connection, url: str) -> None:
        link.send(RETIRE)
        while is_taken(url):
            pass

    worked(settings_in(tmp_path), parent)


def is_taken(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz", trust_env=False)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "wrong", "message"),
    [
        ({"tls_cert_file": "none.pem", "tls_key_file": "none.pem"}, True, "tls_cert_file"),
        ({}, False, "no tables yet"),
    ],
)
def test_a_worker_that_cannot_serve_says_why(
    tmp_path: Path, given: dict[str, Any], wrong: bool, message: str
) -> None:
    link, theirs = Pipe()
    settings = Settings(data_dir=tmp_path / "empty", **given)
    with bind("127.0.0.1", 0) as listener, link, theirs:
        with pytest.raises(SystemExit) as ended:
            work(settings, listener, theirs)
        assert ended.value.code == 1
        said = link.recv()
    assert isinstance(said, StartFailed)
    assert (said.wrong, message in said.message) == (wrong, True)


def test_nobody_is_left_to_be_told_why(tmp_path: Path) -> None:
    link, theirs = Pipe()
    link.close()
    settings = Settings(data_dir=tmp_path, event_handler="no_such_module:handler")
    with bind("127.0.0.1", 0) as listener, theirs, pytest.raises(SystemExit):
        work(settings, listener, theirs)


# The parent


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What the parent is told to do, which nobody does."""
    found: list[Plan] = []

    def supervise(plan: Plan) -> None:
        assert Path(os.environ[SHARED_VARIABLE]).is_dir()
        found.append(plan)

    monkeypatch.setattr(workers_module, "supervise", supervise)
    return found


def run_parent(settings: Settings) -> None:
    with bind("127.0.0.1", 0) as listener:
        run_workers(settings, listener, load=lambda: settings, on_started=lambda: None)


def test_the_figures_lie_in_a_folder_that_goes_with_the_parent(
    tmp_path: Path, plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_VARIABLE, "as it was")
    run_parent(settings_in(tmp_path, workers=3))
    assert plans[0].count == 3
    assert os.environ[SHARED_VARIABLE] == "as it was"
    monkeypatch.delenv(SHARED_VARIABLE)
    run_parent(settings_in(tmp_path, workers=2))
    assert SHARED_VARIABLE not in os.environ
    assert [path.name for path in (tmp_path / "staging").glob("*/")] == []


def test_the_figures_of_all_are_served_on_their_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look(plan: Plan) -> None:
        (port,) = [vars(line)["port"] for line in caplog.records if line.message == "metrics"]
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
        assert answer.status_code == 200
        plan.on_ended(1_000_000)

    caplog.set_level("INFO")
    monkeypatch.setattr(workers_module, "supervise", look)
    run_parent(settings_in(tmp_path, workers=2, metrics_port=0))


def test_a_taken_port_of_the_figures_is_named(tmp_path: Path, plans: list[Plan]) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match="metrics_port: cannot listen"):
            run_parent(settings_in(tmp_path, workers=2, metrics_port=port))
    assert plans == []


def test_a_crew_starts_with_what_was_loaded_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(
        workers_module, "start_process", lambda _, settings, *__: started.append(settings)
    )
    loads: list[Settings | SettingsError] = [
        SettingsError("max_tasks: is wrong"),
        Settings(data_dir=tmp_path, max_tasks=2),
    ]

    def load() -> Settings:
        loaded = loads.pop(0)
        if isinstance(loaded, SettingsError):
            raise loaded
        return loaded

    link, theirs = Pipe()
    with bind("127.0.0.1", 0) as listener, link, theirs:
        crew = Crew(Settings(data_dir=tmp_path, metrics_port=1, max_tasks=1), listener, load)
        assert crew.reload() == "max_tasks: is wrong"
        crew.start(theirs)
        assert crew.reload() is None
        crew.start(theirs)
    assert [settings.max_tasks for settings in started] == [1, 2]
    assert [settings.metrics_port for settings in started] == [None, None]


def test_a_start_that_fails_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real processes: both fail, and the first to say so is heard."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGHUP)
    line = ["serve", "--port", "0", "--data-dir", str(tmp_path / "empty"), "--workers", "2"]
    assert main(line) == 1
    assert "consignee: The database has no tables yet" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGHUP) == before
