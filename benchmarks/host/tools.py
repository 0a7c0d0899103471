"""What reading and bounding of tool calls cost the gateway: 64 chats at once, of a form of each kind.

A scripted model writes the same reasoning and call to every chat. Arms differ in what the request says of tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import REPO, Report, with_interval
from benchmarks.host.accounts import cpu_s
from benchmarks.host.cells import Arrivals, ask
from benchmarks.processes import checkout_at, ended_with_block, next_event, start
from gateway.tools.call_families import BY_PARSER
from gateway.tools.reasoning import REASONING_BY_PARSER
from tests.clients import scripted

FORMS = {"hermes": "think", "qwen3_coder": "think", "openai": "openai", "pythonic": "think"}
"""The parser of reasoning, by that of calls: JSON, XML, harmony, pythonic."""
NUM_AT_ONCE = 64
NUM_TOKENS = 128
"""Tokens of an answer. The script is longer, so that a limit ends all answers."""
MAX_SURCHARGE_US = 60.0
"""Largest cost of tools, in microseconds of the gateway's CPU time a token."""
TEMPLATE = "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}<|{{ messages[-1].content }}0|>"
"""The prompt ends in the mark of the form's script."""
TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    },
}
ARMS: dict[str, dict[str, Any]] = {
    "no tools": {},
    "tools": {"tools": [TOOL]},
    "required": {"tools": [TOOL], "tool_choice": "required"},
}


def script(form: str) -> str:
    """Return what the model writes: reasoning of about 20 tokens, and a call of which the arguments are long."""
    begin, end = REASONING_BY_PARSER[FORMS[form]].marks
    words = " ".join(f"{form[:3]} {index * 7919 % 9973}" for index in range(80))
    family = BY_PARSER[form]
    call = family.form.write("write", {"path": f"notes/{form}.txt", "text": words}, 0)
    thought = f"{begin}The file {form} is to be written, with its numbers in order.{end}"
    return thought + family.opening + call + family.closing


def make_model(folder: Path) -> None:
    """Write the scripted model and its tokenizer."""
    scripted.make(folder, {form: [script(form)] for form in FORMS})
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))


@dataclass(frozen=True)
class Gateway:
    port: int
    pid: int


@contextlib.contextmanager
def gateways() -> Iterator[dict[str, Gateway]]:
    """Run a target on the last core and a gateway for each form on the first."""
    cores = sorted(os.sched_getaffinity(0))
    checkout = checkout_at(REPO)
    with tempfile.TemporaryDirectory() as folder, ended_with_block([]) as children:
        make_model(Path(folder))
        worker = ["--model", folder, "--metrics-port", "0", "--kv-cache-tokens", "65536"]
        children.append(start(checkout, "target_service", worker, cores[-1:]))
        target = ["--target", str(next_event(children[0])["address"])]
        found = {}
        for form, reasoning in FORMS.items():
            args = ["--port", "0", "--grpc-port", "0", "--tool-call-parser", form, "--reasoning-parser", reasoning]
            children.append(start(checkout, "gateway", target + args, cores[:1]))
            http = str(next_event(children[-1])["http"])
            found[form] = Gateway(int(http.rpartition(":")[2]), children[-1].process.pid)
        yield found


@dataclass(frozen=True)
class Pass:
    us_a_token: float
    """CPU time of the gateway."""
    num_events: int


def run_pass(gateway: Gateway, form: str, asked: Mapping[str, Any]) -> Pass:
    """Answer all chats of an arm once."""
    body = {
        "messages": [{"role": "user", "content": form}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        **asked,
    }

    async def answers() -> list[Arrivals]:
        asks = [ask(gateway.port, "/v1/chat/completions", dict(body)) for _ in range(NUM_AT_ONCE)]
        return await asyncio.gather(*asks)

    before_s = cpu_s(gateway.pid)
    arrivals = asyncio.run(answers())
    spent_s = cpu_s(gateway.pid) - before_s
    return Pass(1e6 * spent_s / (NUM_AT_ONCE * NUM_TOKENS), sum(each.num_events for each in arrivals))


def measure(report: Report, repetitions: int) -> None:
    """Run all arms in turn, and add their table to the report."""
    rows = list[list[str]]()
    violations = list[str]()
    with gateways() as found:
        for form, gateway in found.items():
            passes: dict[str, list[Pass]] = {arm: [] for arm in ARMS}
            for repetition in range(repetitions + 1):
                for arm, asked in ARMS.items():
                    made = run_pass(gateway, form, asked)
                    if repetition > 0:  # the first answers of a process cost more
                        passes[arm].append(made)
            for arm, own in passes.items():
                pairs = zip(own, passes["no tools"], strict=True)
                mean, low, high = with_interval([each.us_a_token - other.us_a_token for each, other in pairs])
                surcharge = ""
                if arm != "no tools":
                    surcharge = f"{mean:.1f} ({low:.1f} to {high:.1f})"
                    if low > MAX_SURCHARGE_US:
                        violations.append(f"{form}, {arm}: {surcharge} us a token, above {MAX_SURCHARGE_US:g}")
                cost_us = statistics.median(each.us_a_token for each in own)
                num_events = statistics.median(each.num_events for each in own)
                rows.append([form, arm, f"{cost_us:.0f}", surcharge, f"{num_events:.0f}"])
            report.data[form] = {
                arm: [[each.us_a_token, each.num_events] for each in own] for arm, own in passes.items()
            }
    columns = ["form", "arm", "gateway, us a token", "more than without tools, us", "events"]
    report.table(f"{NUM_AT_ONCE} chats at once, {NUM_TOKENS} tokens each, plain, streamed", columns, rows)
    report.text(
        "CPU time of the gateway and its processes, by the operating system's accounts; the difference is the mean of "
        "pairs of passes with its interval of 95 %. The tokens are of four characters. With tools their definitions "
        "are part of the prompt, which the gateway renders and tokenises for each chat."
    )
    report.verdict(violations)
