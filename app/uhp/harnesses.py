"""Which harnesses there are, and which models each can run (Harnesses chapter, H-01 to H-04).

Harnesses come from the configuration and belong to every scope; none is made over the API.

    GET /v1/harnesses    GET /v1/harnesses/{id}    GET /v1/harnesses/{id}/models
    GET /v1/models       GET /v1/harnesses/{id}/events (live, Streaming section 5)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.uhp.errors import UhpError
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from app.uhp.sse import EventStream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.harness.base import HarnessDescription
    from app.harness.registry import ConfiguredHarness
    from app.uhp.engine import Engine
    from app.uhp.services import Services


def routes(services: Services) -> list[UhpRoute]:
    """The routes of harnesses and models."""
    handlers = Harnesses(services.harnesses, services.engine)
    return [
        UhpRoute("/v1/harnesses", {"GET": handlers.list, "HEAD": handlers.list}),
        UhpRoute("/v1/models", {"GET": handlers.catalogue, "HEAD": handlers.catalogue}),
        UhpRoute("/v1/harnesses/{harness_id}", {"GET": handlers.inspect, "HEAD": handlers.inspect}),
        UhpRoute(
            "/v1/harnesses/{harness_id}/models", {"GET": handlers.models, "HEAD": handlers.models}
        ),
        UhpRoute("/v1/harnesses/{harness_id}/events", {"GET": handlers.events}),
    ]


def harness_not_found() -> UhpError:
    """The refusal for a harness that is not configured."""
    return UhpError("harness_not_found", "There is no such harness.", param="metadata.harness_id")


def harness_object(description: HarnessDescription) -> dict[str, Any]:
    """A configured harness."""
    return {
        "id": description.id,
        "object": "harness",
        "name": description.name,
        "base": description.base,
        "baseLabel": description.base.capitalize(),
        "defaultModel": description.default_model,
        "systemPrompt": "",
        "mcpServers": [],
        "skills": [],
        "plugins": [],
        "disabledTools": list(description.disabled_tools),
        "maxStep": None,
        "timeoutSeconds": description.timeout_seconds,
        "createdAt": description.created_at_ms,
    }


@dataclass(frozen=True, slots=True)
class Harnesses:
    """The handlers."""

    configured: Mapping[str, ConfiguredHarness]
    engine: Engine

    async def list(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/harnesses`."""
        del request
        shown = [harness_object(harness.description) for harness in self.configured.values()]
        return json_answer({"harnesses": shown})

    async def inspect(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/harnesses/{id}`."""
        return json_answer(harness_object(self._named(request).description))

    async def models(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/harnesses/{id}/models`."""
        harness = self._named(request)
        description = harness.description
        return json_answer(
            {
                "harness_id": description.id,
                "backend": description.base,
                "default": description.default_model,
                "fallback": description.default_model,
                "models": _models(harness),
            }
        )

    async def catalogue(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/models`: by backend, each model once."""
        del request
        backends: dict[str, Any] = {}
        for harness in self.configured.values():
            description = harness.description
            backend = backends.setdefault(
                description.base, {"default": description.default_model, "models": []}
            )
            known = {model["id"] for model in backend["models"]}
            backend["models"] += [m for m in _models(harness) if m["id"] not in known]
        return json_answer({"backends": backends})

    async def events(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/harnesses/{id}/events`: the caller's tasks on it, live, until it leaves."""
        harness_id = self._named(request).description.id
        return EventStream(self.engine.feed(request.scope, harness_id))

    def _named(self, request: UhpRequest) -> ConfiguredHarness:
        harness = self.configured.get(request.path["harness_id"])
        if harness is None:
            raise harness_not_found()
        return harness


def _models(harness: ConfiguredHarness) -> list[dict[str, Any]]:
    """`available` is computed: a harness that cannot start serves no model (section 3.1)."""
    description = harness.description
    available = harness.is_available()
    return [
        {
            "id": model,
            "label": model,
            "backend": description.base,
            "available": available,
            "default": model == description.default_model,
        }
        for model in description.models
    ]
