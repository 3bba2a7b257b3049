"""The harnesses that the configuration describes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.harness.base import Harness, HarnessDescription
from app.harness.budgets import Budgeted
from app.harness.command import CommandHarness
from app.harness.echo import EchoHarness
from app.settings import HarnessSettings, Settings

DEFAULT = HarnessSettings(name="echo", base="echo")
"""What is there when nothing is configured."""


@dataclass(frozen=True, slots=True)
class ConfiguredHarness:
    """One harness as a client selects it.

    `is_available` looks anew at every call: a model is available only while its harness could
    start (Harnesses section 3.1).
    """

    description: HarnessDescription
    harness: Harness
    is_available: Callable[[], bool]


def build_harnesses(settings: Settings) -> Mapping[str, ConfiguredHarness]:
    """Every configured harness by its id, in order of configuration; the first is the default."""
    now_ms = time.time_ns() // 1_000_000
    configured = settings.harnesses or (DEFAULT,)
    grace_seconds = settings.harness_grace_seconds
    return {each.harness_id: _built(each, now_ms, grace_seconds) for each in configured}


def _built(settings: HarnessSettings, now_ms: int, grace_seconds: float) -> ConfiguredHarness:
    description = HarnessDescription(
        id=settings.harness_id,
        name=settings.name,
        base=settings.base,
        models=settings.models,
        default_model=settings.models[0],
        created_at_ms=now_ms,
        timeout_seconds=settings.timeout_seconds,
    )
    harness = (
        EchoHarness()
        if settings.base == "echo"
        else CommandHarness(settings, grace_seconds=grace_seconds)
    )
    budgeted = Budgeted(harness, settings.timeout_seconds)
    return ConfiguredHarness(description, budgeted, harness.is_available)
