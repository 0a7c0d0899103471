"""Pages in a real browser. Each is watched from its first byte to its end: it speaks to its own gateway alone, breaks
no policy, logs no error and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

URL = os.environ.get("OUTRIDER_PAGE_URL", "")
collect_ignore_glob = [] if URL else ["test_*.py"]

if URL:
    from playwright.sync_api import Browser, Page, expect, sync_playwright

    expect.set_options(timeout=30_000)

WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
window.longTasks = [];
new PerformanceObserver((list) => longTasks.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({ type: "longtask", buffered: true });
"""
LEFT = """async () => ({
  local: localStorage.length, session: sessionStorage.length, cookies: document.cookie,
  databases: (await indexedDB.databases()).length, workers: (await navigator.serviceWorker.getRegistrations()).length,
  caches: (await caches.keys()).length, violations,
})"""
NOTHING_LEFT = {"local": 0, "session": 0, "cookies": "", "databases": 0, "workers": 0, "caches": 0, "violations": []}
figures: list[str] = []
"""Printed at the end."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox does not start as root
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=os.environ["OUTRIDER_PAGE_BROWSER"], args=arguments)
        yield launched
        launched.close()


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Return how to open the page. `expected`: what the console may say, and policies that may be broken."""
    ends: list[Callable[[], None]] = []

    def open_page(url: str = URL, *, expected: tuple[str, ...] = (), width: int = 1200, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        hosts: set[str] = set()
        faults: list[str] = []
        context.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        context.add_init_script(WATCH)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))

        def end() -> None:
            left = page.evaluate(LEFT)
            left["violations"] = [each for each in left["violations"] if not each.startswith(expected)]
            assert left == NOTHING_LEFT and context.cookies() == []
            assert hosts == {urlsplit(url).netloc}
            assert [fault for fault in faults if not any(each in fault for each in expected)] == []
            context.close()

        ends.append(end)
        page.goto(url)
        return page

    yield open_page
    for end in ends:
        end()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for figure in figures:
        terminalreporter.write_line(figure)
