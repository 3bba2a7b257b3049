"""`[[harnesses]]`: what may stand there, and what becomes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.harness.echo import PACE_SECONDS
from app.harness.registry import build_harnesses
from app.settings import Settings, SettingsError, load_settings
from tests.harness.tasks import a_task, text_of


def _settings(folder: Path, text: str) -> Settings:
    config = folder / "consignee.toml"
    config.write_text(text)
    return load_settings(config)


def test_without_any_there_is_one_echo() -> None:
    [(harness_id, configured)] = build_harnesses(Settings()).items()
    described = configured.description
    assert (described.id, described.name, described.base) == (harness_id, "echo", "echo")
    assert harness_id == "chrn_092c79e8f80e559e404bcf660c48f352"
    assert described.models == ("default",)
    assert described.default_model == "default"
    assert described.created_at_ms > 1_700_000_000_000
    assert described.timeout_seconds == 3600
    assert configured.is_available()


@pytest.mark.anyio
async def test_a_built_harness_runs(tmp_path: Path) -> None:
    [configured] = build_harnesses(Settings()).values()
    task = a_task(tmp_path, "Reply with exactly: ok", timeout_seconds=PACE_SECONDS * 100)
    assert text_of([event async for event in configured.harness.run(task)]) == "ok"


def test_configured_ones_come_in_order_with_their_ids(tmp_path: Path) -> None:
    settings = _settings(
        tmp_path,
        f"""
        [[harnesses]]
        name = "Reporter"
        base = "command"
        id = "chrn_reporter"
        argv = [{sys.executable!r}, "agent.py", "{{model}}"]
        models = ["small", "large"]
        timeout_seconds = 60
        output = "jsonl"
        environment = ["SOME_KEY"]
        max_output_bytes = "1MiB"

        [[harnesses]]
        name = "echo"
        base = "echo"

        [[harnesses]]
        name = "missing"
        base = "command"
        argv = ["no-such-program-anywhere"]
        """,
    )
    built = list(build_harnesses(settings).values())
    assert [each.description.name for each in built] == ["Reporter", "echo", "missing"]
    assert built[0].description.id == "chrn_reporter"
    assert built[0].description.models == ("small", "large")
    assert built[0].description.default_model == "small"
    assert [each.is_available() for each in built] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('base = "echo"', "harnesses.0.name: Field required"),
        ('name = "x"', "harnesses.0.base: Field required"),
        ('name = "x"\nbase = "codex"', "harnesses.0.base"),
        ('name = "x"\nbase = "echo"\ncolour = "red"', "harnesses.0.colour: unknown key"),
        ('name = "x"\nbase = "echo"\nargv = ["x"]', "argv is for base"),
        ('name = "x"\nbase = "command"', "argv is needed"),
        ('name = "x"\nbase = "command"\nargv = [""]', "argv is needed"),
        ('name = "x"\nbase = "command"\nargv = ["./agent"]', "absolute path"),
        ('name = "x"\nbase = "echo"\nid = "chrn_a/b"', "harnesses.0.id"),
        ('name = "x"\nbase = "echo"\nmodels = []', "harnesses.0.models"),
        ('name = "x"\nbase = "echo"\ntimeout_seconds = 0', "harnesses.0.timeout_seconds"),
        ('name = "x"\nbase = "command"\nargv = ["a"]\nenvironment = ["A=B"]', "environment"),
        ('name = "x"\nbase = "echo"\n[[harnesses]]\nname = "x"\nbase = "echo"', "same id or name"),
    ],
)
def test_a_wrong_one_is_refused_with_its_key(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(SettingsError) as refused:
        _settings(tmp_path, f"[[harnesses]]\n{text}\n")
    assert fault in str(refused.value)


def test_variables_of_agents_are_not_unknown_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSIGNEE_AGENT_KEY", "x")
    monkeypatch.setenv("CONSIGNEE_TASK_FILE", "x")
    text = """
        [[harnesses]]
        name = "x"
        base = "command"
        argv = ["x"]
        environment = ["CONSIGNEE_AGENT_KEY"]
        """
    assert _settings(tmp_path, text).harnesses[0].environment == ("CONSIGNEE_AGENT_KEY",)
    with pytest.raises(SettingsError, match="CONSIGNEE_AGENT_KEY"):
        _settings(tmp_path, "")
