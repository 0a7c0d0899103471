"""`outrider chat`."""

import os
import re
from contextlib import suppress

from tests.terminal import Terminal, terminal
from tests.unit.outrider.cli.generate.typed import RUN, outrider
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, hanging


def test_chat_keeps_and_forgets_history(gateway: ScriptedGateway) -> None:
    script = "one\ntwo\n\n/reset\nthree\n/quit\nnever\n"
    result = outrider("chat", "--address", gateway.address, "--system", "be brief", stdin=script)
    assert result.exit_code == 0
    assert result.stdout == TEXT * 3
    system, one, answer = ("system", "be brief"), ("user", "one"), ("assistant", TEXT)
    assert [_messages(request) for request in gateway.requests] == [
        [system, one],
        [system, one, answer, ("user", "two")],
        [system, ("user", "three")],
    ]


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    with terminal(*RUN, "chat", "--address", gateway.address, env=os.environ) as shown:
        shown.wait_for(_lines(">"))
        shown.press("one\n")
        shown.wait_for("quick red")
        shown.press("\x03")
        shown.wait_for(_lines("red", ">"))
        assert gateway.cancelled.wait(5)
        _interrupt_prompt(shown)
        shown.press("two\n")
        shown.wait_for(_lines("ran", ">"))
        shown.press("\x04")
        assert shown.wait() == 0
    assert _messages(gateway.requests[1]) == [("user", "one"), ("assistant", " the quick red"), ("user", "two")]


def _lines(*texts: str) -> re.Pattern[str]:
    """What a screen has that shows these one below the other, the last of them alone in its line."""
    return re.compile(".*^".join(texts) + "$", re.DOTALL | re.MULTILINE)


def _interrupt_prompt(shown: Terminal) -> None:
    """Ctrl-C at a prompt gives up the line only. Python forgets one that comes while the prompt is being set up."""
    for _ in range(20):
        shown.press("\x03")
        with suppress(AssertionError):
            shown.wait_for(_lines("red", ">", ">"), timeout_s=1)
            return
    raise AssertionError("no new prompt after Ctrl-C")


def _messages(request) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]
