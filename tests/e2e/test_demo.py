"""`outrider demo`, and the judge that it calls: it must be able to say no."""

import re
from types import SimpleNamespace

import pytest

from outrider.cli.demo.demo_parts import before_edit
from outrider.cli.demo.demo_runs import DemoOutput, compare
from outrider.client import Usage
from outrider.lab.models.reference_generate import Generated
from outrider.lab.models.reference_generate import compare as judged
from outrider.wire.processes.stop_flag import StopFlag, StopRequested
from tests.e2e.process_tree import Command, tree
from tests.stack import DEMO_TARGET

PROMPT = "import os\n\ndef "


def an_answer(ids: list[int]) -> DemoOutput:
    return DemoOutput(PROMPT, "", ids, Usage(0, len(ids), 0, 0, 0, 0, 0, 0), 1.0)


def test_the_judge_says_yes_to_the_targets_own_and_no_to_one_wrong_token() -> None:
    target = SimpleNamespace(without_end=lambda ids: ids)
    own = Generated([1, 2], list(range(10, 34)), [0.5] * 24)
    assert judged(target, own, own.ids) is None
    wrong = [*own.ids[:7], 99, *own.ids[8:]]
    assert judged(target, own, wrong) == {"position": 7, "expected": 17, "found": 99, "top2_gap": 0.5}
    assert judged(target, own, own.ids[:-2]) == {"position": 22, "expected": 32, "found": None, "top2_gap": 0.5}


def test_a_stop_ends_the_judge() -> None:
    stop = StopFlag()
    stop.set()
    with tree() as left:
        with pytest.raises(StopRequested):
            compare(DEMO_TARGET, 24, 1.1, [an_answer([1])], stop)
        assert left.now() == {}


@pytest.mark.timeout(300)  # beside another process's tests, and the first to compile
def test_the_demo_shows_what_speculation_did_and_proves_the_text() -> None:
    with tree() as left:
        command = Command("-c", "from outrider.cli.main import main; main()", "demo", "--no-ray", "--max-tokens", "16")
        assert command.wait(270) == 0, command.log()
        assert left.now() == {}
    out = "\n".join(command.out)
    for shown in ("1. an edit:", "2. n-grams:", "3. a draft model:", "def parse_header(line):"):
        assert shown in out
    assert len(re.findall(r"\d\.\d\d times as fast as without drafts \(median of 5 prompts", out)) == 3
    assert len(re.findall(r"\d\.\d\dx +\d\.\d\d \(\d+/\d+\) +\d+\.\d\d +20 of 20", out)) == 3
    assert "matches target alone: yes (60 answers, 960 tokens" in out
    assert "about a minute, 10 at most" in command.log(), "the longest silence is announced"
    command.end()


def test_before_an_edit_a_line_is_not_there_yet() -> None:
    assert before_edit("a\nb\nc\nd") == "a\nb\nd"
    assert before_edit("a") == "a"
