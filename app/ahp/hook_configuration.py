"""What `hooks/configuration` tells a host: what to send here, and where its attachments go.

A host that uses the SDK takes its subscriptions from this and builds its upload callback from
their `upload`, with nothing written by hand. `auth` is left out on purpose: a host finds out where
to get a token from the endpoint's own metadata (AHP-S11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agenthooksprotocol.runtime import ProtocolError

from app.settings import SettingsError, SubscriptionSettings

if TYPE_CHECKING:
    from app.ahp.hook_messages import Validator
    from app.settings import Settings

_EVERYTHING = SubscriptionSettings(events=("*",), mode="observe")


def configuration_of(settings: Settings, validator: Validator) -> dict[str, Any]:
    """The `configuration` of the answer.

    Raises SettingsError for a subscription that the draft does not have, such as one that would
    intercept an event that can only be observed.
    """
    upload = _upload(settings, validator)
    subscriptions = [
        _subscription(subscription) | upload
        for subscription in settings.event_subscriptions or (_EVERYTHING,)
    ]
    for place, subscription in enumerate(subscriptions):
        _require_valid(place, subscription, validator)
    return {"subscriptions": subscriptions}


def _upload(settings: Settings, validator: Validator) -> dict[str, Any]:
    """The upload endpoint, unless it is one that no host may use: plain HTTP over a network."""
    upload = {
        "endpoint": settings.upload_endpoints[0],
        "timeoutMs": settings.upload_timeout_ms,
        "maxBytes": int(settings.max_upload_bytes),
    }
    return {"upload": upload} if _is_valid(validator, "content-upload", upload) else {}


def _subscription(settings: SubscriptionSettings) -> dict[str, Any]:
    subscription: dict[str, Any] = {
        "events": list(settings.events),
        "mode": settings.mode,
        "content": dict(settings.content),
        "includeNative": settings.include_native,
    }
    if settings.mode == "intercept":
        subscription["timeoutMs"] = settings.timeout_ms
        subscription["failurePolicy"] = settings.failure_policy
    filters = {"toolKinds": settings.tool_kinds, "paths": settings.paths}
    if chosen := {name: list(values) for name, values in filters.items() if values}:
        subscription["filters"] = chosen
    return subscription


def _require_valid(place: int, subscription: dict[str, Any], validator: Validator) -> None:
    if not _is_valid(validator, "configuration", {"subscriptions": [subscription]}):
        raise SettingsError(
            f"event_subscriptions.{place}: the draft has no such subscription: an event is unknown "
            f"or cannot be delivered in the mode {subscription['mode']}, or a value is twice there"
        )


def _is_valid(validator: Validator, kind: str, value: Any) -> bool:
    try:
        validator.validate(kind, value)
    except ProtocolError:
        return False
    return True
