"""What a user does on the page, by the names that it has there."""

import json
import re
from typing import Any

from playwright.sync_api import Page, Route, expect

ANSWER_MS = 300_000
LONG_TASK_MS = 200.0
"""What a user begins to feel as a halt."""
CODE = "class Stack:\n    def __init__(self):\n        self.items = []\n"


def fill_in(page: Page, prompt: str, *, mode: str = "Completion", **settings: Any) -> None:
    """Settings by their labels, with _ for a space."""
    expect(page.locator("#system")).to_contain_text("ready")
    page.get_by_role("radio", name=mode).check()
    page.get_by_label("Prompt").fill(prompt)
    page.evaluate("document.getElementById('settings').open = true")
    for name, value in settings.items():
        page.get_by_label(name.replace("_", " ")).fill(str(value))


def send(page: Page, prompt: str, **settings: Any) -> None:
    fill_in(page, prompt, **settings)
    page.get_by_role("button", name="Send").click()


def wait_done(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=ANSWER_MS)


def answer_text(page: Page, index: int = -1) -> str:
    """Return what is shown of an answer, by default of the last."""
    answer = page.locator(".message.answered").nth(index)
    return "\n".join(answer.locator(".text").last.locator("div").all_text_contents())


def longest_task(page: Page) -> float:
    """Return how long the page's longest task took, in ms: 0 where none was longer than 50."""
    return max(page.evaluate("longTasks"), default=0.0)


def asking_for(page: Page, **more: Any) -> None:
    """What the page asks for is more than its form can say."""

    def go_on(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | more))

    page.route(re.compile("/completions$"), go_on)
