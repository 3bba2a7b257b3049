"""Whom a token is for. Events are an audience of their own, apart from everything else (AHP-R48).

A token that was made for the upload endpoint must not deliver events, and the other way round,
whatever permissions it lists. So the `aud` of a token decides which of its permissions count:

* the URL of a hooks path is for events alone, wherever the configuration lists it;
* `event_audience` names further values for events, `audience` those for all else; a value in both
  is for both, which is how one token is granted both;
* a server that tells of no audiences (`audience` is empty) leaves it to the permissions, unless
  its token names an endpoint of this receiver all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from app.auth.principals import Principal
    from app.settings import IntrospectionSettings, IssuerSettings, Permission, Settings

_OF_EVENTS: Final[frozenset[Permission]] = frozenset({"ahp.hooks"})


@dataclass(frozen=True, slots=True)
class Audiences:
    """The values of `aud` that one server's tokens may have here, and what each opens.

    `general` is None where `aud` is not checked; `events` likewise. `uploads` and `hooks` are the
    URLs of this receiver's own endpoints.
    """

    general: frozenset[str] | None
    events: frozenset[str] | None
    uploads: frozenset[str]
    hooks: frozenset[str]

    @classmethod
    def of(cls, table: IssuerSettings | IntrospectionSettings, settings: Settings) -> Audiences:
        """The audiences that the configuration gives a server."""
        uploads, hooks = frozenset(settings.upload_endpoints), frozenset(settings.hooks_endpoints)
        is_checked = bool(table.audience)
        general = frozenset(table.audience) - hooks if is_checked else None
        named = is_checked or bool(table.event_audience)
        events = frozenset(table.event_audience) | hooks if named else None
        return cls(general, events, uploads, hooks)

    @property
    def accepted(self) -> frozenset[str]:
        """Every value that opens something; empty where any does."""
        if self.general is None or self.events is None:
            return frozenset()
        return self.general | self.events

    def limit(self, principal: Principal, aud: object) -> Principal:
        """`principal` with those of its permissions that a token for `aud` may use."""
        values = aud if isinstance(aud, list) else [aud]
        given = frozenset(value for value in values if isinstance(value, str))
        kept = principal.permissions
        if not _opens(given, self.general, others=self.hooks, own=self.uploads):
            kept &= _OF_EVENTS
        if not _opens(given, self.events, others=self.uploads, own=self.hooks):
            kept -= _OF_EVENTS
        return replace(principal, permissions=kept)


def _opens(
    given: frozenset[str],
    accepted: frozenset[str] | None,
    *,
    others: frozenset[str],
    own: frozenset[str],
) -> bool:
    """Whether one of `given` is accepted; unchecked, whether it names not only `others`."""
    if accepted is not None:
        return not accepted.isdisjoint(given)
    return others.isdisjoint(given) or not own.isdisjoint(given)
