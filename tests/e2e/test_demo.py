"""`outrider demo`, and the judge that it calls: it must be able to say no."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from outrider.cli.demo import report
from outrider.cli.demo_runs import Arm, Comparison, DemoAnswer, compare
from outrider.client import Usage
from outrider.engine.reference_generate import Generated
from outrider.engine.reference_generate import compare as judged
from outrider.wire.processes import StopFlag, StopRequested
from tests.e2e.process_tree import Command, tree
from tests.stack import DEMO_TARGET

PROMPT = "import os\n\ndef "


def an_answer(ids: list[int]) -> DemoAnswer:
    return DemoAnswer(PROMPT, ids, Usage(0, len(ids), 0, 0, 0, 0, 0, 0), 1.0)


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
            compare(DEMO_TARGET, 24, [an_answer([1])], stop)
        assert left.now() == {}


@pytest.mark.timeout(300)  # beside another process's tests, and the first to compile
def test_the_demo_shows_what_speculation_did_and_proves_the_text() -> None:
    with tree() as left:
        command = Command("-c", "from outrider.cli.main import main; main()", "demo", "--no-ray", "--max-tokens", "16")
        assert command.wait(270) == 0, command.log()
        assert left.now() == {}
    out = "\n".join(command.out)
    assert "def list_files(path):" in out
    assert re.search(r"start to first token: \d+\.\d s", out)
    assert re.search(r"acceptance rate: 0\.\d\d \(\d+/\d+\)", out)
    assert re.search(r"mean accepted length: [2-6]\.\d\d", out)
    assert re.search(r"tokens per target pass: [1-6]\.\d\d", out)  # beside other tests drafts come late
    assert re.search(r"tokens/s with speculation: \d+\.\d", out)
    assert re.search(r"tokens/s without speculation: \d+\.\d", out)
    assert "matches target alone: yes (13 answers" in out
    command.end()


def test_a_difference_is_shown_with_its_gap_and_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    usage = Usage(9, 24, 8, 40, 16, 0, 0, 0)
    arm = Arm([DemoAnswer(PROMPT, [1] * 24, usage, 2.0)])
    plain = Arm([DemoAnswer(PROMPT, [1] * 24, Usage(9, 24, 0, 0, 0, 24, 0, 0), 3.0)])
    difference = {"answer": 2, "position": 5, "expected": 11, "found": 12, "top2_gap": 3e-6}
    report((arm, plain), Comparison(3, 72, [difference]))
    out = capsys.readouterr().out
    assert "acceptance rate: 0.40 (16/40)" in out
    assert "mean accepted length: 3.00" in out
    assert "tokens/s with speculation: 12.0" in out
    assert "tokens/s without speculation: 8.0 (1.50x with)" in out
    assert "answer 2 differs at position 5: token 12, the target alone says 11" in out
    assert "3e-06 apart, a near-tie" in out
    assert "matches target alone: no" in out
