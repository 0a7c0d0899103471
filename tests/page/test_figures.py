"""What the page weighs and how soon it is there; and its pictures in the documentation."""

import gzip
import io
import os
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Route, expect

from tests.page.conftest import OpenPage, figures
from tests.page.driver import CODE, LONG_TASK_MS, longest_task, send, wait_done

CHAT_URL = os.environ.get("OUTRIDER_PAGE_CHAT_URL", "")
REPO = Path(__file__).parents[2]
MAX_PICTURE_BYTES = 150_000
MAX_RAW_BYTES = 64 * 1024
MAX_PACKED_BYTES = 24 * 1024
MAX_PAINT_MS = 2_000.0
"""Many times what it takes, since the machine may be busy with all else that is tested."""


def test_figures(open_page: OpenPage) -> None:
    files = [file.read_bytes() for file in sorted((REPO / "gateway/page").rglob("*.*"))]
    raw, packed = sum(map(len, files)), sum(len(gzip.compress(file)) for file in files)
    figures.append(f"{len(files)} files: {raw} bytes, {packed} with gzip")
    assert raw < MAX_RAW_BYTES and packed < MAX_PACKED_BYTES
    page = open_page()
    expect(page.locator("#system")).to_contain_text("ready")
    (paint,) = page.evaluate("performance.getEntriesByName('first-contentful-paint').map((each) => each.startTime)")
    longest = longest_task(page)
    figures.append(
        f"first contentful paint after {paint:.0f} ms; longest task until the page is ready: {longest:.0f} ms"
    )
    assert paint < MAX_PAINT_MS and longest < LONG_TASK_MS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme, width=1280)

    def with_short_names(route: Route) -> None:
        response = route.fetch()
        (model,) = response.json()["data"]
        route.fulfill(json={"data": [model | {"draft": "outrider/demo-draft"}]})

    page.route("**/v1/models", with_short_names)
    expect(page.locator("#system")).to_contain_text("outrider/demo-draft")
    send(page, CODE, Temperature=0.8, Max_tokens=96, Seed=5)
    wait_done(page)
    page.locator("#rounds li", has=page.locator(".accepted")).filter(has=page.locator(".rejected")).last.click()
    page.evaluate("document.getElementById('settings').open = false")
    page.locator("h1").hover()
    ending = "" if scheme == "light" else "-dark"
    completion, replay = (REPO / f"docs/images/page-{name}{ending}.png" for name in ("completion", "replay"))
    save(page.screenshot(), completion)
    page.locator(".watching").evaluate("(column) => column.children[1].scrollIntoView()")
    save(page.screenshot(), replay)


@pytest.mark.skipif(not CHAT_URL, reason="no chat model is here: say make chat once")
@pytest.mark.parametrize(
    ("name", "scheme", "width"), [("chat", "light", 1280), ("chat-dark", "dark", 1280), ("chat-phone", "light", 390)]
)
def test_pictures_of_a_chat(open_page: OpenPage, name: str, scheme: str, width: int) -> None:
    page = open_page(CHAT_URL, color_scheme=scheme, width=width)
    expect(page.locator("#system")).to_contain_text("n-grams, in the target")
    page.evaluate("document.getElementById('seed').value = 3")
    page.get_by_role("button", name="Send").click()
    wait_done(page)
    save(page.screenshot(), REPO / f"docs/images/page-{name}.png")


def save(screenshot: bytes, path: Path) -> None:
    """In 256 colours, which nobody sees and which are a third of the bytes."""
    with Image.open(io.BytesIO(screenshot)) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MAX_PICTURE_BYTES
