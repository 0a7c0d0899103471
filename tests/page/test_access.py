"""Everybody can use it: axe-core finds nothing in any state, dark or light, and narrow or zoomed nothing is lost."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.page.conftest import OpenPage
from tests.page.driver import CODE, asking_for, fill_in, send, wait_done


def assert_accessible(page: Page, state: str) -> None:
    results = Axe().run(page)
    assert results.violations_count == 0, f"{state}: {results.generate_report()}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_state(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme, expected=("400",))
    expect(page.locator("#system")).to_contain_text("ready")
    assert_accessible(page, "empty")
    asking_for(page, ignore_eos=True)
    send(page, CODE, Max_tokens=8000, Temperature=1)
    expect(page.locator("#rounds .rejected").first).to_be_visible()
    assert_accessible(page, "streaming")
    page.get_by_role("button", name="Stop").click()
    wait_done(page)
    page.locator("#rounds li", has=page.locator(".rejected")).first.click()
    assert_accessible(page, "replay")
    fill_in(page, CODE, Max_tokens=16)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#comparison .sentence")).to_be_visible()
    assert_accessible(page, "compared")
    send(page, CODE, mode="Chat", Max_tokens=1_000_000)
    expect(page.get_by_role("alert")).to_be_visible()
    assert_accessible(page, "error")


@pytest.mark.parametrize("width", [320, 600])
def test_nothing_is_lost_where_it_is_narrow(open_page: OpenPage, width: int) -> None:
    """320 CSS pixels are a screen of 1280 at 400 %, 600 one of 1200 at 200 %."""
    page = open_page(width=width)
    send(page, CODE, Temperature=1, Max_tokens=32, Seed=7)
    wait_done(page)
    page.locator("#rounds li", has=page.locator(".rejected")).first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for locator in page.locator("button:visible, input:visible, select:visible, textarea:visible, h2").all():
        box = locator.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, locator
    assert_accessible(page, f"{width} wide")
