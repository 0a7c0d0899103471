"""What people do on the page, by keyboard too, on the real system."""

import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.conftest import OpenPage, figures
from tests.page.driver import (
    ANSWER_MS,
    CODE,
    LONG_TASK_MS,
    answer_text,
    asking_for,
    fill_in,
    longest_task,
    send,
    wait_done,
)


def committed_text(page: Page) -> str:
    """Return what the rounds of the last answer committed."""
    tokens = page.locator("#rounds .new .token:not(.rejected)").all_text_contents()
    return "".join(tokens).replace("↵", "\n")


def test_a_completion_is_streamed_and_its_rounds_are_drawn(open_page: OpenPage) -> None:
    page = open_page()
    send(page, CODE, Temperature=0, Max_tokens=64)
    wait_done(page)
    expect(page.get_by_role("status")).to_contain_text("Done. 64 tokens")
    lines = page.locator("#rounds li")
    last = lines.last
    expect(last.locator(".past")).not_to_be_empty()
    assert committed_text(page) == answer_text(page)
    assert page.locator("#rounds .token.accepted").count() > 0 < page.locator("#rounds .token.own").count()
    passes = lines.count()
    expect(page.locator("#numbers")).to_contain_text(f"Tokens per target pass{64 / passes:.2f}")
    expect(page.locator("#positions li")).to_have_count(5)
    expect(page.get_by_role("img", name=re.compile("rounds; the list"))).to_be_visible()


def test_the_answer_and_its_rounds_are_seen_without_scrolling_as_they_come(open_page: OpenPage) -> None:
    page = open_page(width=1280)
    asking_for(page, ignore_eos=True)
    expect(page.locator("#system")).to_contain_text("ready")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#rounds li").nth(10)).to_be_visible()
    for newest in (page.locator(".message.answered .text div").last, page.locator("#rounds li").last):
        expect(newest).to_be_in_viewport(ratio=1)
    wait_done(page)
    assert page.evaluate("scrollY") == 0


@pytest.mark.parametrize(("template", "mode"), [("turns", "Chat"), ("plain", "Completion"), (None, "Completion")])
def test_the_first_screen_offers_what_the_model_is_made_for(
    open_page: OpenPage, template: str | None, mode: str
) -> None:
    def served(route: Route) -> None:
        (model,) = route.fetch().json()["data"]
        alone = {"draft": None, "drafter": "ngram", "drafters": ["ngram"]}
        route.fulfill(json={"data": [model | alone | {"chat_template": template}]})

    page = open_page()
    page.route("**/v1/models", served)
    page.reload()
    expect(page.locator("#system")).to_contain_text("n-grams, in the target")
    expect(page.get_by_role("radio", name=mode)).to_be_checked()
    expect(page.get_by_label("Prompt")).to_have_value(re.compile("Write a" if mode == "Chat" else "class "))


def test_a_chat_goes_on_from_what_was_said(open_page: OpenPage) -> None:
    page = open_page()
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    for prompt in ("def a():", "def b():"):
        send(page, prompt, mode="Chat", Max_tokens=8, System_message="Python.")
        wait_done(page)
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert bodies[1]["messages"][2]["content"] == answer_text(page, 0)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    send(page, "def c():", mode="Chat", Max_tokens=8)
    wait_done(page)
    assert len(bodies[2]["messages"]) == 2


def test_everything_is_reached_and_done_by_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#system")).to_contain_text("ready")
    page.evaluate("document.getElementById('settings').open = true")
    press = page.keyboard.press
    reached = []
    for _ in range(30):
        press("Tab")
        found = page.evaluate(
            "[document.activeElement.id || document.activeElement.name || document.activeElement.className ||"
            " document.activeElement.localName, getComputedStyle(document.activeElement).outlineStyle]"
        )
        if found[0] == "body":
            break
        reached.append(found[0])
        assert found[1] != "none", f"the focus is not seen on {found[0]}"
    form = "skip model mode prompt summary temperature seed max-tokens k drafter acceptance send compare"
    assert reached == [*form.split(), "transcript", "rounds-scroll", "previous", "play", "next"]

    page.get_by_label("Prompt").focus()
    press("Control+A")
    page.keyboard.type("def add(a, b):")
    press("Control+Enter")
    wait_done(page)
    assert page.evaluate("document.activeElement.id") == "prompt"
    expect(page.locator("#place")).to_contain_text("Round 1 of")
    page.locator("#position").focus()
    press("End")
    num = int(page.locator("#position").get_attribute("max") or 0)
    expect(page.locator("#place")).to_have_text(f"Round {num} of {num}")
    press("ArrowLeft")
    expect(page.locator("#place")).to_have_text(f"Round {num - 1} of {num}")
    press("Home")
    press("ArrowRight")
    expect(page.locator("#place")).to_have_text(f"Round 2 of {num}")
    expect(page.get_by_role("status")).to_have_text(re.compile("Round 2. .+ target (kept|said)"))
    press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator("#place")).not_to_have_text(f"Round 2 of {num}")
    press("Space")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_round_shows_what_both_models_thought(open_page: OpenPage) -> None:
    """At a temperature above 0 the draft's law is beside the target's; at 0 its guesses are."""
    page = open_page()
    for temperature, beside in ((1, "What the draft drew from"), (0, "What the draft guessed, best first")):
        fill_in(page, CODE, Temperature=temperature, Max_tokens=256, Seed=7)
        page.get_by_label("Acceptance").select_option("rejection")
        page.get_by_role("button", name="Send").click()
        wait_done(page)
        page.locator("#rounds li", has=page.locator(".rejected")).first.click()
        step = page.locator("#step")
        expect(step.get_by_role("heading", name=beside)).to_be_visible()
        expect(step.locator(".bars").first.locator("li")).to_have_count(5)
        shares = [float(text.removesuffix(" %")) for text in step.locator(".share").all_text_contents()[:5]]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 101
        expect(step.locator(".chain .rejected")).to_have_count(1)
        refused, said = (step.locator(f".chain .{look}").text_content() for look in ("rejected", "own"))
        expect(step.locator(".sentence")).to_contain_text(f"refused “{refused}” and said “{said}” instead")


def test_a_tree_is_shown_with_each_branch_below_its_node(open_page: OpenPage) -> None:
    page = open_page()
    asking_for(page, speculation={"explain": True, "tree": "4x2x1"})
    send(page, CODE, Temperature=0, Max_tokens=64)
    wait_done(page)
    line = page.locator("#rounds li", has=page.locator(".accepted")).filter(has=page.locator(".rejected")).first
    line.click()
    nodes = page.locator("#step .tree li")
    depths = nodes.evaluate_all("(nodes) => nodes.map((node) => Number(node.style.getPropertyValue('--depth')))")
    assert depths == [0, 1, 2, 1, 2] * 4
    fates = [text.rpartition(" ")[2] for text in nodes.locator(".remark").all_text_contents()]
    num_accepted = fates.count("accepted")
    expect(line.locator(".did")).to_have_text(f"{num_accepted} of 20")
    path = [index for index, found in enumerate(fates) if found == "accepted"]
    assert [depths[index] for index in path] == list(range(num_accepted))
    refused = [index for index, found in enumerate(fates) if found == "rejected"]
    # Refused are the children of the last accepted node, all of them, and they stand in its part of the list.
    assert [depths[index] for index in refused] == [num_accepted] * (4, 2, 1)[num_accepted]
    assert all(depth >= num_accepted for depth in depths[path[-1] + 1 : refused[-1]])


def test_compare_asks_plain_then_speculative(open_page: OpenPage) -> None:
    page = open_page()
    bodies: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    fill_in(page, CODE, Temperature=1, Max_tokens=64)
    page.get_by_label("Acceptance").select_option("coupled")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#comparison .sentence")).to_contain_text("The texts are equal.", timeout=ANSWER_MS)
    plain, speculative = bodies
    assert plain["speculation"]["enabled"] is False and speculative["speculation"]["num_draft_tokens"] == 5
    assert plain["seed"] == speculative["seed"] and plain["cache_salt"] != speculative["cache_salt"]
    rows = page.locator("#comparison tbody tr")
    cells = [row.inner_text().split("\t") for row in rows.all()]
    assert [row[0] for row in cells] == ["Without", "With"]
    said = page.locator("#comparison .sentence").inner_text()
    assert re.match(r"(\d\.\d\d times (faster|slower) with|About as fast with) speculation", said)
    rates = re.search(r": (\d+) tokens/s with, (\d+) without\.", said)
    assert rates is not None and rates.groups() == (cells[1][2], cells[0][2])
    assert int(cells[0][3]) == 64 > int(cells[1][3]) and all(re.fullmatch(r"\d+ ms", row[1]) for row in cells)


def test_compare_in_a_chat_shows_both_answers_whole(open_page: OpenPage) -> None:
    """Even where no frame is drawn before both are there, as in a tab that is hidden."""
    page = open_page()
    page.evaluate("() => { window.held = []; window.requestAnimationFrame = (draw) => held.push(draw); }")
    fill_in(page, CODE, mode="Chat", Temperature=0, Max_tokens=64)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#comparison .sentence")).to_contain_text("The texts are equal.", timeout=ANSWER_MS)
    wait_done(page)
    page.evaluate("held.forEach((draw) => draw())")
    expect(page.locator(".message h3")).to_have_text(["You", "Without speculation", "You", "With speculation"])
    assert answer_text(page, 0) == answer_text(page, 1) == committed_text(page) != ""


def test_an_answer_is_stopped(open_page: OpenPage) -> None:
    page = open_page()
    asking_for(page, ignore_eos=True)
    send(page, CODE, Max_tokens=8000)
    expect(page.locator("#rounds li").nth(10)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    wait_done(page)
    assert 0 < int(re.findall(r"Done\. (\d+) tokens", page.get_by_role("status").inner_text())[0]) < 8000
    send(page, CODE, Max_tokens=4)
    wait_done(page)
    expect(page.get_by_role("status")).to_contain_text("Done. 4 tokens")


def test_an_error_is_said(open_page: OpenPage) -> None:
    page = open_page(expected=("400",))
    send(page, CODE, Max_tokens=1_000_000)
    expect(page.get_by_role("alert")).to_contain_text("1000000")
    wait_done(page)
    send(page, CODE, Max_tokens=4)
    wait_done(page)
    expect(page.locator("#error")).to_be_hidden()


def test_what_failed_in_a_chat_is_marked_and_not_sent_again(open_page: OpenPage) -> None:
    page = open_page()
    bodies: list[Any] = []

    def broken(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        events = ({"choices": [{"index": 0, "delta": {"content": "half an"}}]}, {"error": {"message": "target lost"}})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(body=f": ping\n\n{body}data: [DONE]\n\n", content_type="text/event-stream")

    def whole(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.continue_()

    first, second, third = prompts = ("def a():", "def b():", "def c():")
    for prompt, answered in zip(prompts, (whole, broken, whole), strict=True):
        page.route("**/v1/chat/completions", answered, times=1)
        send(page, prompt, mode="Chat", Max_tokens=8)
        wait_done(page)
    assert answer_text(page, 1) == "half an"
    expect(page.locator(".message .hint")).to_have_text("This failed, and is not part of the chat.")
    expect(page.locator(".message", has=page.locator(".hint"))).to_contain_text("half an")
    contents = [[message["content"] for message in body["messages"]] for body in bodies]
    said = answer_text(page, 0)
    assert contents == [[first], [first, said, second], [first, said, third]]


def test_a_key_is_asked_for_and_stays_in_memory(open_page: OpenPage) -> None:
    page = open_page(os.environ["OUTRIDER_PAGE_KEYED_URL"], expected=("401",))
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    field.fill("or-wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("key")
    field.fill(os.environ["OUTRIDER_PAGE_KEY"])
    page.keyboard.press("Enter")
    expect(field).to_be_hidden()
    assert page.locator("#key").input_value() == "" and "or-" not in page.url
    send(page, CODE, Max_tokens=8)
    wait_done(page)
    expect(page.get_by_role("status")).to_contain_text("Done. 8 tokens")
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()


def draft_pid() -> int:
    return int(Path(os.environ["OUTRIDER_PAGE_DRAFT_PID"]).read_text())


def test_a_draft_that_dies_is_seen_and_comes_back_while_an_answer_goes_on(open_page: OpenPage) -> None:
    page = open_page()
    asking_for(page, ignore_eos=True)
    send(page, CODE, Max_tokens=12_000, Temperature=0.8, Seed=1)
    newest = page.locator("#rounds li").last
    expect(newest.locator(".did")).to_contain_text(" of ")
    draft = page.locator("#system > div").nth(1)
    expect(draft).to_contain_text("ready")
    os.kill(draft_pid(), signal.SIGKILL)
    expect(draft).to_contain_text("away: the target goes on without it")
    expect(newest.locator(".did")).to_have_text("plain")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(draft).to_contain_text("ready")
    expect(newest.locator(".did")).to_contain_text(" of ")
    page.get_by_role("button", name="Stop").click()
    wait_done(page)
    expect(page.locator("#error")).to_be_hidden()


def test_ten_thousand_tokens_do_not_freeze_the_page(open_page: OpenPage) -> None:
    page = open_page()
    asking_for(page, ignore_eos=True)
    page.evaluate("""() => {
        window.said = [];
        new MutationObserver(() => said.push(performance.now()))
          .observe(document.getElementById("said"), { childList: true });
    }""")
    send(page, CODE, Max_tokens=10_000, Temperature=1, Seed=3)
    wait_done(page)
    expect(page.get_by_role("status")).to_contain_text("Done. 10000 tokens")
    longest = longest_task(page)
    figures.append(f"longest task while 10,000 tokens came: {longest:.0f} ms")
    assert longest < LONG_TASK_MS
    num_elements = page.evaluate("document.querySelectorAll('#rounds *').length")
    assert num_elements < 120 * 80, num_elements
    said = page.evaluate("said")
    pauses = [later - earlier for earlier, later in itertools.pairwise(said[1:-1])]
    assert all(pause > 4900 for pause in pauses), pauses  # but for what is said at the beginning and the end
    assert_replay_is_quick(page)


def assert_replay_is_quick(page: Page) -> None:
    page.locator("#position").focus()
    page.evaluate("window.longTasks = []")
    for key in ("End", "ArrowLeft", "Home"):
        page.keyboard.press(key)
    expect(page.locator("#place")).to_contain_text("Round 1 of")
    assert longest_task(page) < LONG_TASK_MS
