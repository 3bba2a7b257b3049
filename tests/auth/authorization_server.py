"""The real authorization server of the tests: node, npm and the package `oidc-provider`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

from tests.npm import NODE, modules

SOURCE = Path(__file__).parent / "oidc"

JWT_RESOURCE = "https://consignee.test/ahp/uploads"
OPAQUE_RESOURCE = "https://opaque.consignee.test/ahp/uploads"


def oidc_modules() -> Path:
    """Where the package `oidc-provider` is installed."""
    return modules("oidc-provider", SOURCE)


class AuthorizationServer:
    """A running server: what it issues, and the commands that it follows."""

    def __init__(self, commands: IO[str], lines: IO[str]) -> None:
        self._commands = commands
        self._lines = lines
        self.issuer = self._wait_for("issuer")

    def _wait_for(self, word: str) -> str:
        """What follows `word` on the first line that begins with it."""
        for line in self._lines:
            if line.startswith(word + " "):
                return line.removeprefix(word).strip()
        raise RuntimeError("the authorization server has ended; see its log")

    def command(self, name: str) -> None:
        """Have the server do `name` (see server.mjs), and wait until it is done."""
        self._commands.write(name + "\n")
        self._commands.flush()
        assert self._wait_for("done") == name

    async def token(
        self, *, client: str = "agent", resource: str = JWT_RESOURCE, scope: str = "ahp.upload"
    ) -> str:
        """An access token by client credentials with a resource indicator (RFC 8707)."""
        form = {"grant_type": "client_credentials", "resource": resource, "scope": scope}
        answer = await self._post("/token", form, client)
        return str(answer.json()["access_token"])

    async def revoke(self, token: str, *, client: str = "agent") -> None:
        """Revoke `token` (RFC 7009)."""
        await self._post("/token/revocation", {"token": token}, client)

    async def _post(self, path: str, form: dict[str, str], client: str) -> httpx.Response:
        async with httpx.AsyncClient(auth=(client, f"{client}-secret")) as http:
            answer = await http.post(self.issuer + path, data=form)
        return answer.raise_for_status()


@contextmanager
def running(folder: Path, algorithm: str) -> Iterator[AuthorizationServer]:
    """The server in `folder`, signing with `algorithm`; it ends with the block."""
    shutil.copy(SOURCE / "server.mjs", folder)
    (folder / "node_modules").symlink_to(oidc_modules())
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [str(NODE / "bin" / "node"), "server.mjs", algorithm],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield AuthorizationServer(process.stdin, process.stdout)
        finally:
            process.kill()
