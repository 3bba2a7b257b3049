"""The settings of events: what is taken, and what is one clear error."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest

from app.settings import Settings, SettingsError, load_settings


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)


def loaded(folder: Path, text: str) -> Settings:
    config = folder / "consignee.toml"
    config.write_text(text)
    return load_settings(config)


def test_events_are_configured_as_the_file_says(tmp_path: Path) -> None:
    settings = loaded(
        tmp_path,
        """
        hooks_paths = ["/ahp/hooks", "/tenant/hooks"]
        internal_refs = true
        max_event_bytes = "64KiB"
        event_retention = "90d"
        event_handler = "handlers.images:Images.handle"

        [[event_subscriptions]]
        events = ["tool.*", "turn.end", "model.response.after"]
        mode = "observe"
        content = { default = "metadata", images = "body" }

        [[event_subscriptions]]
        events = ["tool.before"]
        mode = "intercept"
        timeout_ms = 500
        failure_policy = "fail-closed"
        """,
    )
    assert settings.hooks_paths == ("/ahp/hooks", "/tenant/hooks")
    assert settings.internal_refs
    assert settings.max_event_bytes == 65536
    assert settings.event_retention == timedelta(days=90)
    assert settings.event_handler == "handlers.images:Images.handle"
    observing, intercepting = settings.event_subscriptions
    assert observing.content == {"default": "metadata", "images": "body"}
    assert (intercepting.timeout_ms, intercepting.failure_policy) == (500, "fail-closed")
    assert intercepting.content == {"default": "body"}


def test_there_may_be_no_event_receiver(tmp_path: Path) -> None:
    assert loaded(tmp_path, "hooks_paths = []").hooks_paths == ()


OBSERVE = '[[event_subscriptions]]\nevents = ["*"]\nmode = "observe"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('hooks_paths = ["/ahp/uploads"]', "upload_paths and hooks_paths name a path twice"),
        ('hooks_paths = ["/a", "/a"]', "name a path twice"),
        ('hooks_paths = ["hooks/"]', "hooks_paths: 'hooks/' is not a plain absolute path"),
        ('event_handler = "handlers.images"', "event_handler: "),
        ('event_handler = "handlers/images.py:handle"', "event_handler: "),
        ('event_retention = "soon"', "event_retention: "),
        ("event_timeout_seconds = 0", "event_timeout_seconds: "),
        ("upload_timeout_ms = 0", "upload_timeout_ms: "),
        (OBSERVE + "timeout_ms = 1", 'timeout_ms is for mode = "intercept"'),
        (OBSERVE + 'failure_policy = "fail-open"', 'failure_policy is for mode = "intercept"'),
        (OBSERVE + 'content = { images = "body" }', "content: must say what is sent by default"),
        (OBSERVE + 'content = { default = "all" }', "content.default: "),
        (OBSERVE.replace('"*"', ""), "events: "),
        (OBSERVE.replace('"*"', '"Tool"'), "events.0: "),
        (OBSERVE.replace("observe", "watch"), "mode: "),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape(complaint)) as error:
        loaded(tmp_path, text)
    assert "\n" not in str(error.value)
