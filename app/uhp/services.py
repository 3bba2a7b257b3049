"""What the routes of this package stand on, handed to each module's `routes(services)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.auth.authenticator import Authenticator
    from app.harness.registry import ConfiguredHarness
    from app.harness.workspace import Workspaces
    from app.http.metrics import Metrics
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.uhp.cursors import Cursors
    from app.uhp.engine import Engine
    from app.uhp.previews import Previews


@dataclass(frozen=True, slots=True)
class Services:
    """Made once in main.py; `harnesses` by their id."""

    settings: Settings
    store: ContentStore
    authenticator: Authenticator
    metrics: Metrics
    harnesses: Mapping[str, ConfiguredHarness]
    workspaces: Workspaces
    engine: Engine
    previews: Previews
    cursors: Cursors
