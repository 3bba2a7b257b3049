"""Who a request speaks for."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import Forbidden
from app.settings import Permission


@dataclass(frozen=True, slots=True)
class Principal:
    """What one verified credential gives: a name, an authorization scope and permissions.

    The scope is the unit of ownership: two credentials of one scope share what they store, two
    scopes share nothing (AHP-R10, R36).
    """

    name: str
    scope: str
    permissions: frozenset[Permission]

    def require(self, permission: Permission) -> None:
        """Raise Forbidden unless this principal has `permission` (AHP-R11, R30)."""
        if permission not in self.permissions:
            raise Forbidden(permission)
