"""What can go wrong when something is sent.

    SendError
    ├── ConfigurationError   the upload configuration cannot be used
    ├── SourceError          the bytes cannot be had, or are not what was expected
    ├── TransferError        the receiver did not confirm them
    ├── AuthorizationError   no credential could be had, or the receiver refused it
    └── BudgetExceeded       the time for all of it is over

A transfer failure is not a hook failure (AHP-S44): none of these says anything of an event.
`code` is stable and machine-readable, `message` says what was wrong and what to do; neither ever
holds a credential, an endpoint, a path of this machine or a part of a body.
"""

from __future__ import annotations


class SendError(Exception):
    """The base of everything that keeps bytes from being confirmed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigurationError(SendError):
    """The upload configuration cannot be used; nothing was read and nobody was contacted."""

    def __init__(self, message: str, *, code: str = "configuration") -> None:
        super().__init__(code, message)


class SourceError(SendError):
    """The bytes cannot be had, changed, are over a limit, or are not what was expected."""


class TransferError(SendError):
    """The receiver did not confirm the bytes. `status` is what it answered, where it did.

    `retry_after` in seconds is what the receiver asked for; `transient` tells whether another
    upload of the same bytes may succeed.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int | None = None,
        transient: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(code, message)
        self.status = status
        self.transient = transient
        self.retry_after = retry_after


class AuthorizationError(SendError):
    """No credential could be had for this endpoint, or the receiver refused the one it got."""


class BudgetExceeded(SendError):
    """The time for authorization, transfer and retries together is over (AHP-S12)."""

    def __init__(self) -> None:
        super().__init__(
            "budget_exceeded",
            "The upload did not finish within its time; allow more, or send less.",
        )
