"""`outrider bench`: its arithmetic, what it refuses, and servers that are no Outrider."""

from __future__ import annotations

import gzip
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.lab.load.figures import ArmFigures, Gain, RungFigures, Turn, all_failed
from outrider.lab.load.load import Asked
from outrider.lab.load.plot import bars, trade
from outrider.lab.load.report import show, verdicts


def answer(tokens: int, seconds: float, first_s: float = 0.1, **told: int) -> Asked:
    usage = {"completion_tokens": tokens, **({"speculation": told} if told else {})}
    return Asked(0.0, first_s, seconds, 200, None, None, usage)


REFUSED = Asked(0.0, None, 0.1, 429, "1")


DRAFTED = {"num_rounds": 3, "num_plain_steps": 2, "num_draft_tokens": 10, "num_accepted_tokens": 7}


def turns(seconds: list[float], **told: int) -> list[Turn]:
    return [Turn((answer(10, each, **told),)) for each in seconds]


def test_the_gain_is_of_the_same_turns() -> None:
    """The machine is three times as slow in some turns: it is so for both arms, and no noise of the ratio."""
    plain = [3.0, 1.0, 3.0, 1.0, 1.0, 3.0]
    gain = Gain.of(turns([each / 2 for each in plain]), turns(plain))
    assert gain is not None and gain.interval is not None and gain.pays
    assert (gain.ratio, *gain.interval) == pytest.approx((2.0, 2.0, 2.0))


def test_an_interval_on_both_sides_of_one_says_nothing() -> None:
    gain = Gain.of(turns([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]), turns([2.0, 1.0, 2.0, 1.0, 2.0, 1.0]))
    assert gain is not None and gain.interval is not None
    assert gain.interval[0] < gain.ratio == 1.0 < gain.interval[1] and gain.pays is None


def test_few_turns_have_no_interval_and_no_answers_no_ratio() -> None:
    few = Gain.of(turns([1.0] * 4), turns([2.0] * 4))
    assert few == Gain(2.0, None) and few.pays is None
    assert Gain.of(turns([1.0]), [Turn((REFUSED,))]) is None


def test_figures_of_an_arm() -> None:
    asked = (answer(11, 1.1, 0.1, **DRAFTED), answer(21, 4.2, 0.2, **DRAFTED), REFUSED)
    found = ArmFigures.of([Turn(asked)])
    assert (found.num_requests, found.num_failed, found.faults) == (3, 1, {"refused (429)": 1})
    assert found.tokens_per_s == pytest.approx(32 / 4.2)
    assert (found.token_s.p50, found.token_s.p99) == pytest.approx((0.2, 0.2))
    assert found.tokens_per_s_per_user == pytest.approx(5.0)
    assert (found.first_token_s.p50, found.answer_s.p95) == (0.2, 4.2)
    assert found.acceptance_rate == pytest.approx(0.7) and found.tokens_per_target_pass == pytest.approx(3.2)
    assert not all_failed([RungFigures.of(1, [Turn(asked)], [])])


def test_verdicts_and_plots_say_it_plainly() -> None:
    rungs = [
        RungFigures.of(1, turns([1.0] * 6, **DRAFTED), turns([2.0] * 6)),
        RungFigures.of(4, turns([2.0] * 6, **DRAFTED), turns([1.0] * 6)),
        RungFigures.of(8, turns([1.0] * 2, **DRAFTED), turns([1.0] * 2)),
        RungFigures.of(16, turns([1.0] * 6), turns([2.0] * 6)),
    ]
    assert [rung.pays for rung in rungs] == [True, False, None, None]
    said = list(verdicts(rungs))
    assert said[0].startswith("1 at once: speculation pays, 2.00 times the tokens/s of plain decoding (2.00-2.00)")
    assert said[1].startswith("4 at once: speculation does not pay, 0.50 times")
    assert said[2].startswith("8 at once: 1.00 times") and "2 turns are too few" in said[2]
    assert said[3].startswith("16 at once: nothing was drafted, 2.00 times")
    lines = list(bars(rungs))
    assert [line.count("█") for line in lines] == [56, 28, 28, 56, 56, 56, 56, 28]
    picture = "\n".join(trade(rungs))
    assert "●" not in picture and "◐" in picture  # here both arms have the same two points
    shown = io.StringIO()
    show(rungs, Console(file=shown, width=80, force_terminal=True, color_system=None))
    assert "2.00 (2.00-2.00)" in shown.getvalue() and "…" not in shown.getvalue()
    assert "6+6" in shown.getvalue() and max(map(len, shown.getvalue().splitlines())) <= 80, shown.getvalue()


# ---- the command


def benched(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gateway", "127.0.0.1:1"), ("no answer from http://127.0.0.1:1", "outrider up", "--gateway")),
        (("--gateway", "ftp://a"), ("ftp://a", "must look like http://HOST:PORT")),
        (("--gateway", "http://a", "--tls"), ("http://a", "https://")),
        (("--gateway", "https://a", "--tls-cert", "README.md", "--tls-key", "README.md"), ("tls_key", "README.md")),
        (("--concurrency", "0"), ("--concurrency is 0", "at least 1")),
        (("--requests", "0"), ("--requests is 0",)),
        (("--seconds", "-1"), ("--seconds is -1",)),
        (("--prompts", "/nowhere.txt"), ("cannot read prompts from /nowhere.txt",)),
        (("--prompts", "/dev/null"), ("/dev/null has no prompt",)),
        (("--png", "plot.pdf"), ("plot.pdf", "must end in .png")),
        (("--json", "/nowhere/out.json"), ("no folder /nowhere",)),
        (("--temperature", "-1"), ("temperature",)),
    ],
)
def test_what_cannot_be_is_refused_at_once(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    made = benched(*args)
    assert made.exit_code == 1 and not made.stdout
    assert made.stderr.strip().count("\n") == 0, made.stderr
    for word in words:
        assert word in made.stderr


EVENTS = (
    {"choices": [{"finish_reason": None}]},
    {"choices": [{"finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
)


@contextmanager
def another_server(status: int, models: object, line_end: bytes = b"\n") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI server of which nothing else is known: its URL, and the bodies it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._say(200, json.dumps(models).encode())

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            told = [*(json.dumps(event).encode() for event in EVENTS), b"[DONE]"]
            stream = b"".join(b"data: " + event + 2 * line_end for event in told)
            self._say(status, stream if status == 200 else b"out of order")

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if "gzip" in self.headers["Accept-Encoding"]:
                body = gzip.compress(body)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


def test_another_server_is_asked_only_what_openai_has(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("one\n\ntwo\n")
    models = {"data": [{"id": "m", "owned_by": "somebody"}]}
    with another_server(200, models) as (url, bodies):
        args = ("--prompts", str(prompts), "--concurrency", "2", "--requests", "6", "--json", str(out))
        made = benched("--gateway", f"{url}/v1", *args)
    assert made.exit_code == 0, made.stderr
    assert "m is measured as it is" in made.stderr and "2 at once: 6 of 6 requests" in made.stderr
    plain = {"prompt", "max_tokens", "temperature", "seed", "stream", "stream_options", "model"}
    assert all(set(body) == plain and body["model"] == "m" for body in bodies)
    assert {body["prompt"] for body in bodies[:2]} == {"one", "two"}
    assert len(bodies) == 8  # and two that do not count
    found = json.loads(out.read_text())
    assert found["rungs"][0]["arms"]["as it is"]["num_requests"] == 6 and found["rungs"][0]["gain"] is None
    assert found["command"].startswith("outrider") and found["served"] == models["data"][0]
    assert {"date", "machine of the load", "versions"} <= set(found)


def test_a_name_is_text_and_events_may_end_in_crlf() -> None:
    model = "evil[/b]\x1b[2J[q4]"
    with another_server(200, {"data": [{"id": model}]}, b"\r\n") as (url, _):
        made = benched("--gateway", url, "--concurrency", "1", "--requests", "2")
    assert made.exit_code == 0, made.stderr
    assert made.stdout.startswith("evil[/b]␛[2J[q4] at ") and "\x1b" not in made.output


def test_failures_are_counted_and_told() -> None:
    with another_server(500, {"data": [{"id": "m", "drafters": ["model"], "owned_by": "outrider"}]}) as (url, _):
        made = benched("--gateway", url, "--concurrency", "1", "--requests", "2")
    assert made.exit_code == 1
    assert "4 failed: 500: out of order" in made.stdout and "tokens/s" not in made.stdout


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"error": "no"}, ("no list of models",)),
        ({"data": []}, ("it has none",)),
        ({"data": [{"id": "a"}, {"id": "b"}]}, ("say --model", "a, b")),
    ],
)
def test_no_model_to_ask(models: object, words: tuple[str, ...]) -> None:
    with another_server(200, models) as (url, _):
        made = benched("--gateway", url)
    assert made.exit_code == 1 and url in made.stderr
    for word in words:
        assert word in made.stderr
