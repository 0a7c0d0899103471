"""Nothing that a model, a user, a name or an error says becomes anything but text, and no script but ours runs."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.page.conftest import OpenPage
from tests.page.driver import answer_text, asking_for, send, wait_done

PAYLOADS = (
    "<script>pwned = 1</script><img src=x onerror='pwned = 1'>",
    "</div><svg/onload=pwned=1><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "[x](javascript:pwned=1) ![x](http://elsewhere.invalid/x.png) **bold** <a href=//elsewhere.invalid>x</a>",
)
OURS = "script[src='page/main.js'], link[href^='page/']"


def assert_only_text(page: Page) -> None:
    assert page.evaluate("typeof pwned") == "undefined"
    assert page.locator("img, iframe, a:not(.skip), b b, svg svg, object, embed, base, form form").count() == 0
    assert page.locator("script, link").count() == page.locator(OURS).count() == 3


@pytest.mark.parametrize("payload", PAYLOADS)
def test_prompts_and_answers_of_the_real_system(open_page: OpenPage, payload: str) -> None:
    page = open_page()
    asking_for(page, structured_outputs={"choice": [payload]})
    send(page, payload, mode="Chat", Max_tokens=200, System_message=payload)
    wait_done(page)
    assert answer_text(page) == payload
    assert page.locator(".asked .text").inner_text() == payload
    assert_only_text(page)


def events(payload: str) -> str:
    """A stream in which everything that is text is the payload."""
    token = {"id": 1, "text": payload}
    ranked = [{**token, "logprob": -0.5}]
    round_ = {
        "committed_len": 1,
        "drafter": payload,
        "num_drafted": 2,
        "num_accepted": 1,
        "batch_size": 2,
        "draft": [
            {**token, "parent": -1, "accepted": True, "kind": "drawn"},
            {**token, "id": 2, "parent": 0, "accepted": False, "kind": payload},
        ],
        "rejection": {
            "parent": 0,
            "token": {**token, "id": 3},
            "target": ranked,
            "draft_law": ranked,
            "draft_guesses": [token],
        },
        "timings": dict.fromkeys(("total_us", "hold_us", "queue_us", "forward_us", "accept_us", "other_us"), 1000)
        | {"draft_us": 500},
    }
    tokens = [{**token, "kind": "accepted"}, {**token, "id": 3, "kind": "recovered"}, {**token, "kind": payload}]
    choice = {"index": 0, "delta": {"content": payload, "reasoning_content": payload}, "finish_reason": payload}
    chunks: list[Any] = [{"choices": [choice | {"speculation": {"tokens": tokens, "round": round_}}]}]
    chunks.append({"error": {"message": payload, "type": payload, "param": payload, "code": payload}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_names_tokens_and_errors_of_a_hostile_gateway(open_page: OpenPage, payload: str) -> None:
    page = open_page()

    def served(route: Route) -> None:
        model = {"id": payload, "draft": payload, "drafter": payload, "drafters": ["model", payload]}
        route.fulfill(json={"data": [model]})

    page.route("**/v1/models", served)
    page.route("**/readyz", lambda route: route.fulfill(json={"ready": True, "reason": None, "refused": [payload]}))
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=events(payload), content_type="text/event-stream")
    )
    expect(page.locator("#system .name").first).to_have_text(payload)
    send(page, payload, mode="Chat")
    wait_done(page)
    expect(page.get_by_role("alert")).to_have_text(payload)
    assert page.locator("#system .name").all_text_contents() == [payload] * 3
    assert page.locator("#rounds .token").all_text_contents() == [payload] * 4
    assert page.locator("#step .bars .token").all_text_contents() == [payload] * 2
    expect(page.locator("#step .sentence")).to_contain_text(payload)
    assert_only_text(page)


def test_the_policy_stops_a_script_that_came_into_the_page(open_page: OpenPage) -> None:
    """Were there a hole, the browser would still run no script that is inline, and read no string as HTML."""
    page = open_page(
        expected=(
            "script-src-elem",
            "script-src-attr",
            "style-src",
            "require-trusted-types",
            "Content Security",
            "TrustedHTML",
            "404",
        )
    )

    def with_scripts(route: Route) -> None:
        response = route.fetch()
        inline = "<script>pwned = 1</script><img src='missing.svg' onerror='pwned = 1'><p style='color: red'>x</p>"
        route.fulfill(response=response, body=response.text().replace("<main>", f"<main>{inline}"))

    page.route(page.url, with_scripts)
    page.reload()
    expect(page.locator("#system")).to_contain_text("ready")
    assert page.evaluate("typeof pwned") == "undefined"
    broken = page.evaluate("violations")
    assert {"script-src-elem", "style-src-attr"} <= set(broken), broken
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    )
    assert refused == "TypeError"
