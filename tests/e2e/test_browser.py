"""A browser opens what an agent wrote to attack it: no script runs, and nothing is shown.

The pages around it are on another origin than the server, as a product's user interface is, and
on the server's own, which is the one that an attack would want.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from playwright.sync_api import sync_playwright

from tests.components import require_component
from tests.e2e.processes import RunningServer, running_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCRIPT = "document.title='hacked';fetch('/stolen?by=script')"

HOSTILE = {
    "image.svg": f'<svg xmlns="http://www.w3.org/2000/svg" onload="{SCRIPT}">'
    f"<script>{SCRIPT}</script></svg>",
    "page.html": f"<!doctype html><title>page</title><script>{SCRIPT}</script>"
    f'<img src="/stolen?by=image" onerror="{SCRIPT}">',
    "PAGE.HTML": f"<script>{SCRIPT}</script>",
    "page.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml"><script>{SCRIPT}</script></html>',
    "page.xml": '<?xml version="1.0"?><?xml-stylesheet type="text/xsl" href="/stolen?by=sheet"?>'
    f'<html xmlns="http://www.w3.org/1999/xhtml"><script>{SCRIPT}</script></html>',
    "page.mht": f"MIME-Version: 1.0\r\nContent-Type: text/html\r\n\r\n<script>{SCRIPT}</script>",
    "page.htm.": f"<script>{SCRIPT}</script>",
    "noname": f"<!doctype html><script>{SCRIPT}</script>",
    "paper.pdf": "%PDF-1.4\n1 0 obj<</OpenAction<</S/JavaScript/JS(app.alert(1))>>>>\n%%EOF",
}


@dataclass
class Watched:
    """A browser whose every request carries the token, as a cookie would: the worst case."""

    server: RunningServer
    page: Any
    stolen: list[str] = field(default_factory=list)

    def put(self, name: str, content: bytes) -> str:
        authorization = {"Authorization": f"Bearer {self.server.token}"}
        session = httpx.post(f"{self.server.url}/v1/sessions", headers=authorization).json()
        put = httpx.put(
            f"{self.server.url}/v1/containers/{session['container_id']}/files/{name}",
            content=content,
            headers={
                **authorization,
                "Content-Type": "application/octet-stream",
                "AHP-Content-SHA256": hashlib.sha256(content).hexdigest(),
            },
        )
        assert put.status_code == 201, put.text
        return f"/v1/containers/{session['container_id']}/files/{put.json()['id']}/content"


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    require_component("chromium", present=CHROMIUM is not None, why="Debian package chromium")
    with running_server() as server, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        context = browser.new_context(
            extra_http_headers={"Authorization": f"Bearer {server.token}"}, accept_downloads=True
        )
        made = Watched(server, context.new_page())
        made.page.on("dialog", lambda dialog: made.stolen.append("dialog"))
        context.on(
            "request",
            lambda request: made.stolen.append(request.url) if "stolen" in request.url else None,
        )
        yield made
        browser.close()


pytestmark = [pytest.mark.component("chromium"), pytest.mark.xdist_group("browser")]


@pytest.mark.requirement("UHP-22", "B55")
@pytest.mark.parametrize("disposition", ["", "?disposition=inline"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_a_download_and_nothing_else(
    watched: Watched, name: str, disposition: str
) -> None:
    content = HOSTILE[name].encode()
    url = watched.server.url + watched.put(name, content) + disposition
    watched.page.goto("about:blank")
    with watched.page.expect_download() as download:
        watched.page.evaluate("url => { window.location = url }", url)
    with open(download.value.path(), "rb") as file:
        assert file.read() == content
    assert watched.page.url == "about:blank"
    assert watched.page.title() == ""
    assert watched.stolen == []


@pytest.mark.requirement("UHP-22", "B55")
@pytest.mark.parametrize("name", ["image.svg", "page.html"])
def test_a_page_of_the_servers_own_origin_runs_none_of_it(watched: Watched, name: str) -> None:
    path = watched.put(name, HOSTILE[name].encode())
    watched.page.goto(f"{watched.server.url}/v1/uhp")
    state = watched.page.evaluate(
        """async path => {
            const made = {};
            for (const kind of ['iframe', 'object', 'embed']) {
                const element = document.createElement(kind);
                element[kind === 'object' ? 'data' : 'src'] = path;
                document.body.append(element);
                made[kind] = element;
            }
            await new Promise(resolve => setTimeout(resolve, 500));
            const shown = made.iframe.contentDocument;
            return shown === null ? '' : shown.documentElement.textContent;
        }""",
        path,
    )
    assert state == ""
    assert watched.page.title() != "hacked"
    assert watched.stolen == []


@pytest.mark.requirement("UHP-21", "B55")
def test_what_is_shown_in_place_is_text_and_stays_text(watched: Watched) -> None:
    url = watched.server.url + watched.put("page.txt", HOSTILE["page.html"].encode())
    watched.page.goto(url + "?disposition=inline")
    assert watched.page.evaluate("document.contentType") == "text/plain"
    assert watched.page.inner_text("pre") == HOSTILE["page.html"]
    assert watched.page.title() != "hacked"
    assert watched.page.evaluate("window.origin") == "null"
    assert watched.stolen == []
