"""Programs as harnesses, over HTTP: the worked example, and programs that misbehave."""

from __future__ import annotations

import base64
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from tests.conformance.peer import (
    SECONDS,
    Peer,
    Site,
    citations_of,
    running_site,
    session_of,
    text_of,
)
from tests.e2e.processes import ROOT
from tests.e2e.wire import digest

pytestmark = pytest.mark.xdist_group("uhp harness")

AGENT = ROOT / "deploy" / "agents" / "report_agent.py"

PROGRAMS = {
    "failing": """
        import sys; print("half"); open("half.txt", "w").write("half"); sys.exit(3)""",
    "counting": """
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(os.getpid(), child.pid, flush=True)
        open("begun.txt", "w").write("begun"); time.sleep(600)""",
    "telling": """
        import os, sys
        print(sorted(os.environ)); print(sorted(os.listdir("/proc/self/fd")))
        print(sys.stdin.read())""",
    "linking": """
        import os; os.symlink("/etc/passwd", "p.txt"); os.symlink("/", "root")
        os.mkfifo("fifo"); os.mkdir("d"); os.symlink("..", "d/up"); open("real", "w").write("r")
        print("done")""",
}


def table(name: str, argv: list[str], *more: str) -> str:
    lines = ["[[harnesses]]", f'name = "{name}"', f'id = "chrn_{name}"', 'base = "command"']
    return "\n".join([*lines, f"argv = {argv!r}", *more, ""])


@dataclass(frozen=True, slots=True)
class Work:
    """A site whose harnesses are programs, and where it keeps things."""

    site: Site
    data_dir: Path

    @property
    def peer(self) -> Peer:
        return self.site.alice

    def run(self, harness: str, task: Any, **fields: Any) -> dict[str, Any]:
        return self.peer.run(task, metadata={"harness_id": f"chrn_{harness}"}, **fields)


def configuration(folder: Path) -> str:
    """A harness for the worked example, one for each program above, and one that is not there."""
    tables = [table("report", [sys.executable, str(AGENT)], 'output = "jsonl"')]
    for name, text in PROGRAMS.items():
        program = folder / f"{name}.py"
        lines = [line.strip() for line in text.strip().splitlines()]
        program.write_text("\n".join(lines))
        tables.append(table(name, [sys.executable, str(program)]))
    tables.append(table("absent", [str(folder / "not-there")]))
    path = folder / "consignee.toml"
    path.write_text("harness_grace_seconds = 1\n" + "\n".join(tables))
    return str(path)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    folder = tmp_path_factory.mktemp("harness")
    options = ("--config", configuration(folder), "--data-dir", str(folder / "data"))
    with running_site(*options, environment={"CONSIGNEE_LOG_LEVEL": "info"}) as site:
        yield Work(site, folder / "data")


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = monotonic() + SECONDS
    while not is_so():
        assert monotonic() < deadline, "it does not come about"
        sleep(0.05)


def has_ended(pids: list[int]) -> bool:
    return not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.requirement("UHP-02", "UHP-11", "UHP-12", "T-01")
def test_the_example_reports_on_its_files(work: Work) -> None:
    content = b"a,b\n1,2\n"
    data = "data:text/csv;base64," + base64.b64encode(content).decode()
    parts = [
        {"type": "input_text", "text": "Report, please."},
        {"type": "input_file", "filename": "numbers.csv", "file_data": data},
    ]
    response = work.run("report", [{"role": "user", "content": parts}])
    assert response["status"] == "completed"
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "function_call", "function_call_output", "message"]
    files = {file["path"]: file for file in work.peer.artifacts(response)}
    assert set(files) == {"report.md", "sizes.svg"}
    assert {cited["file_id"] for cited in citations_of(response)} == {
        file["id"] for file in files.values()
    }
    report = work.peer.content(files["report.md"]).text
    assert f"| numbers.csv | text/csv | 8 | 2 | `{digest(content)}` | yes |" in report
    assert "Asked: Report, please." in report
    chart = work.peer.content(files["sizes.svg"])
    assert chart.headers["content-type"] == "image/svg+xml"
    assert chart.headers["content-disposition"].startswith("attachment")


@pytest.mark.requirement("S-01", "S-09")
def test_the_example_streams(work: Work) -> None:
    events = work.peer.events("Report.", metadata={"harness_id": "chrn_report"})
    assert events[-1].kind == "response.completed"
    assert text_of(events[-1].data["response"]).startswith("There is no file to report on")


def test_a_program_that_fails_keeps_what_it_did(work: Work) -> None:
    response = work.run("failing", "Try.")
    assert response["status"] == "failed"
    assert response["error"]["code"] == "harness_error"
    assert "3" in response["error"]["message"]
    assert text_of(response) == "half\n"
    (file,) = work.peer.artifacts(response)
    assert work.peer.content(file).content == b"half"


def test_a_program_that_is_not_there_is_unavailable(work: Work) -> None:
    body = {"input": "x", "metadata": {"harness_id": "chrn_absent"}}
    work.peer.refused(503, "harness_unavailable", "POST", "/v1/responses", json=body)
    models = work.peer.get("/v1/harnesses/chrn_absent/models")["models"]
    assert [model["available"] for model in models] == [False]


@pytest.mark.requirement("C-03")
def test_a_cancelled_program_ends_with_all_it_started(work: Work) -> None:
    response, pids = begun_counting(work)
    work.peer.post(f"/v1/responses/{response['id']}/cancel")
    ended = work.peer.follow(response)
    assert ended["status"] == "cancelled"
    assert text_of(ended).split() == [str(pid) for pid in pids]
    assert [file["path"] for file in work.peer.artifacts(ended)] == ["begun.txt"]
    wait_for(partial(has_ended, pids))


def begun_counting(work: Work) -> tuple[dict[str, Any], list[int]]:
    """A program that runs on, with the numbers of its processes."""
    response = work.run("counting", "Run on.", background=True)
    path = f"/v1/responses/{response['id']}?stream=true"
    with work.peer.stream("GET", path) as events:
        said = next(e.data["delta"] for e in events if e.kind == "response.output_text.delta")
    pids = [int(pid) for pid in said.split()]
    assert all(is_running(pid) for pid in pids)
    return response, pids


@pytest.mark.requirement("UHP-34", "B89")
def test_a_deleted_session_ends_its_program_and_leaves_no_folder(work: Work) -> None:
    response, pids = begun_counting(work)
    session_id = session_of(response)
    assert (work.data_dir / "workspaces" / session_id).is_dir()
    work.peer.delete(f"/v1/sessions/{session_id}")
    wait_for(partial(has_ended, pids))
    assert not (work.data_dir / "workspaces" / session_id).exists()


def test_a_program_inherits_nothing(work: Work) -> None:
    """No descriptor of the server, and of its environment only what it needs."""
    environment, descriptors, prompt = text_of(work.run("telling", "The prompt.")).splitlines()
    assert eval(descriptors) == ["0", "1", "2", "3"]  # 3 is the listing itself
    assert {"CONSIGNEE_TASK_FILE", "HOME", "PATH", "TMPDIR"} <= set(eval(environment))
    assert not {"CONSIGNEE_LOG_LEVEL", "PYTHONPATH"} & set(eval(environment))
    assert prompt == "The prompt."


@pytest.mark.requirement("B39")
def test_links_and_pipes_are_no_artifacts(work: Work) -> None:
    """They are not followed, not opened, and said to have been left out."""
    events = work.peer.events("Link.", metadata={"harness_id": "chrn_linking"})
    response = events[-1].data["response"]
    assert response["status"] == "completed"
    (file,) = work.peer.artifacts(response)
    assert file["path"] == "real"
    notices = [event.data["message"] for event in events if event.kind == "error"]
    for path in ("p.txt", "root", "fifo", "d/up"):
        assert any(notice.startswith(f"{path} ") for notice in notices), notices


def test_a_stopped_server_ends_its_programs(tmp_path: Path) -> None:
    """However it is stopped."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        folder.mkdir()
        options = ("--config", configuration(folder), "--data-dir", str(folder / "data"))
        with running_site(*options) as site:
            _, pids = begun_counting(Work(site, folder / "data"))
            os.kill(site.server.process.pid, number)
            assert site.server.process.wait(SECONDS) == (0 if number == signal.SIGTERM else -9)
            wait_for(partial(has_ended, pids))
