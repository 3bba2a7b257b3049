"""Every route of UHP, in the order in which they are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.uhp import archive, containers, discovery, files, harnesses, sessions, tasks

if TYPE_CHECKING:
    from app.uhp.http import UhpRoute
    from app.uhp.services import Services


def all_routes(services: Services) -> list[UhpRoute]:
    """The routes of all chapters."""
    modules = (discovery, harnesses, tasks, sessions, archive, files, containers)
    return [route for module in modules for route in module.routes(services)]
