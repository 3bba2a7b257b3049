"""The refusals that the layers raise. They know nothing of HTTP.

    Refusal
    ├── Unauthenticated   no credential, or one that does not verify
    ├── Forbidden         a known principal without the permission
    ├── NotFound          unknown, foreign, expired: all look the same
    ├── Malformed         the request is not what it must be
    ├── TooLarge          over a limit of this receiver
    ├── TooSlow           the sender stopped, or trickles
    ├── Exhausted         no room on the disk
    ├── QuotaExhausted    a budget of this scope or session is spent
    ├── Conflict          the state of things does not allow it
    ├── Unavailable       something that this needs does not answer; try again
    └── Disconnected      the client is gone; nobody is left to answer

Each protocol renders them with one table of its own. `code` is stable and machine-readable,
`message` says what was wrong and what to do; neither ever holds a credential, a path of this
machine or a part of a body.
"""

from __future__ import annotations

from typing import ClassVar


class CommandError(Exception):
    """What ends a command: its text is the line that is printed, `exit_status` how it ends.

    Here so that the command line need not import every layer to know its errors.
    """

    exit_status: ClassVar[int] = 1


class Refusal(Exception):
    """The base of everything that a layer refuses."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Unauthenticated(Refusal):
    """No credential, or one that does not verify.

    `token_given` tells a missing token from a bad one: only the second is `invalid_token`
    in the challenge (RFC 6750 section 3.1).
    """

    def __init__(self, code: str, message: str, *, token_given: bool) -> None:
        super().__init__(code, message)
        self.token_given = token_given


class Forbidden(Refusal):
    """A known principal that lacks `permission`."""

    def __init__(self, permission: str) -> None:
        super().__init__(
            "insufficient_scope", f"This credential does not carry the permission {permission!r}."
        )
        self.permission = permission


class NotFound(Refusal):
    """Unknown, foreign and expired look the same (AHP-R36, UHP-29)."""


class Malformed(Refusal):
    """The request is not what it must be; `param` names the part at fault where there is one."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(code, message)
        self.param = param


class TooLarge(Refusal):
    """Over a limit of this receiver: `limit` in bytes."""

    def __init__(self, limit: int, *, code: str = "too_large") -> None:
        super().__init__(code, f"The body is larger than this receiver takes: {limit} bytes.")
        self.limit = limit


class TooSlow(Refusal):
    """The sender stopped sending, or sends below the minimum rate."""

    def __init__(self, message: str) -> None:
        super().__init__("too_slow", message)


class Exhausted(Refusal):
    """No room for what was sent; nothing of it is kept and what was there before is intact."""

    def __init__(self, message: str = "This receiver has no room left to store the body.") -> None:
        super().__init__("storage_exhausted", message)


class QuotaExhausted(Refusal):
    """A budget of files or bytes is spent: `limit` of what `of` names."""

    def __init__(self, of: str, limit: int) -> None:
        super().__init__("quota_exhausted", f"The limit of {limit} {of} is reached.")
        self.of = of
        self.limit = limit


class Conflict(Refusal):
    """The state of things does not allow it."""


class Unavailable(Refusal):
    """Something that the answer depends on does not answer. `retry_after` in seconds."""

    def __init__(self, code: str, message: str, *, retry_after: int = 1) -> None:
        super().__init__(code, message)
        self.retry_after = retry_after


class Disconnected(Refusal):
    """The client is gone before its request was complete; nobody is left to answer."""

    def __init__(self) -> None:
        super().__init__("disconnected", "The client closed the connection.")
