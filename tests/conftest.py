"""What every test shares."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from tests import backends

# A machine that has other work to do makes no property false.
hypothesis.settings.register_profile("consignee", deadline=None)
hypothesis.settings.load_profile("consignee")

# Behind a shell's `&` it is ignored, and so it would be by each program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The databases of a test go with its folder; that of a module may be in use until its end."""
    own = getattr(item, "funcargs", {}).get("tmp_path")
    backends.drop_databases(below=own)


def pytest_sessionfinish() -> None:
    backends.close()
