"""What is looked at while the system runs in containers, a printed line for each."""

import json
import statistics
import time

from tests.compose.engine import Project, get, output, post
from tests.compose.load import Outcome
from tests.compose.streams import Answer

HTTP = "http://127.0.0.1:8000"
PROM = "http://127.0.0.1:9090"
LOOK = """
import os
try:
    open("/app/x", "w").close()
    written = True
except OSError:
    written = False
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
print(os.getuid(), written, int(status["CapEff"], 16), status["NoNewPrivs"])
"""


class Report:
    """Checks as they are made."""

    def __init__(self) -> None:
        self.num_checks = self.num_failed = 0

    def check(self, name: str, holds: bool, detail: str = "") -> None:
        self.num_checks += 1
        self.num_failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'} {name}{': ' + detail if detail else ''}", flush=True)

    def note(self, text: str) -> None:
        print(f"note   {text}", flush=True)


def all_healthy(project: Project) -> bool:
    states = project.states()
    return states.pop("check", None) == "exited" and bool(states) and set(states.values()) == {"healthy"}


def prometheus_targets() -> dict[str, str]:
    """Health by "job role"."""
    status, body = get(f"{PROM}/api/v1/targets?state=active")
    if status != 200:
        return {}
    labels = [(one["labels"], one["health"]) for one in json.loads(body)["data"]["activeTargets"]]
    return {f"{found['job']} {found.get('role', '')}".strip(): health for found, health in labels}


def all_scraped(timeout_s: float) -> dict[str, str]:
    wanted = {"outrider-gateway", "outrider-workers draft", "outrider-workers target"}
    give_up = time.monotonic() + timeout_s
    while True:
        found = prometheus_targets()
        if {name for name, health in found.items() if health == "up"} >= wanted or time.monotonic() > give_up:
            return found
        time.sleep(1)


def completion(report: Report, model: str = "outrider-demo") -> None:
    body = {"model": model, "prompt": "import os\n\ndef ", "max_tokens": 32, "temperature": 0}
    status, text = post(f"{HTTP}/v1/completions", body)
    written = json.loads(text)["choices"][0]["text"] if status == 200 else text[:200]
    report.check("a completion through the published port", status == 200 and bool(written), repr(written[:50]))


def rights(project: Project, report: Report) -> None:
    """What a container is really given, not what the file says."""
    for service in ("ray-head", "launcher", "draft", "target", "gateway"):
        found = project.python(service, LOOK).split()
        holds = found == ["10001", "False", "0", "1"]
        report.check(f"{service}: uid 10001, read-only root, no capability, no new privileges", holds, " ".join(found))
    published = output(
        ["docker", "ps", "--filter", f"label=com.docker.compose.project={project.name}", "--format", "{{.Ports}}"]
    )
    addresses = {part.rsplit(":", 1)[0] for line in published.split() for part in line.split(",") if "->" in part}
    report.check("published on this machine's own address alone", addresses == {"127.0.0.1"}, ", ".join(addresses))
    said = project.attempt(
        "exec", "-T", "-e", "RAY_AUTH_TOKEN=wrong", "draft", *["ray", "status", "--address", "ray-head:6379"]
    )
    report.check("Ray refuses who has not its token", said is not None and "InvalidAuthToken" in said)


def judge(outcome: Outcome, report: Report, texts: dict[int, str], served_meanwhile: bool) -> None:
    """served_meanwhile: new requests are, too; else they may be refused at the door, with 503, until it is over."""
    hit, name = outcome.hit(), outcome.fault
    refused = [one for one in outcome.answers if one.refused_with == 503]
    errors = [one.error for one in outcome.answers if one.error is not None]
    broken = [one.error for one in hit if one.error is not None]
    wrong = [one.prompt for one in outcome.answers if one.error is None and one.text != texts[one.prompt]]
    report.check(f"{name}: streams were under way", len(hit) > 0, f"{len(hit)} of {len(outcome.answers)} answers")
    report.check(f"{name}: they went on to their end", not broken, "; ".join(broken[:2]))
    if served_meanwhile:
        report.check(f"{name}: no user error", not errors, "; ".join(errors[:2]))
    else:
        others = len(errors) - len(refused)
        detail = f"{len(refused)} refused with 503" + ("; " + "; ".join(errors[:2]) if others else "")
        report.check(f"{name}: nothing worse for new requests than 503 meanwhile", not others, detail)
    report.check(f"{name}: every text as without it", not wrong, f"{len(wrong)} differ" if wrong else "")
    report.check(f"{name}: healthy and drafting again", outcome.settled)


def judge_drain(outcome: Outcome, report: Report, stopped_at: float) -> None:
    """Of a target that was stopped, and had the time that its streams took: its container ended after them."""
    cut = [one for one in outcome.hit() if one.ended > stopped_at]
    detail = f"{len(cut)} of {len(outcome.hit())} had to wait for the next one" if cut else ""
    report.check(f"{outcome.fault}: they came to their end before it went", not cut, detail)


def judge_ends(outcome: Outcome, report: Report, texts: dict[int, str]) -> None:
    """Of a part whose end may cut streams off: each ends in all its tokens, or in one error and no wrong token."""
    hit, name = outcome.hit(), outcome.fault
    cut = [one for one in hit if one.error is not None]
    wrong = [one for one in outcome.answers if not texts[one.prompt].startswith(one.text)]
    wrong += [one for one in outcome.answers if one.error is None and one.text != texts[one.prompt]]
    last = {one.prompt: one for one in sorted(outcome.answers, key=lambda one: one.started)}
    refused = [str(one.error) for one in last.values() if one.error is not None]
    report.check(f"{name}: streams were under way", len(hit) > 0, f"{len(hit)} of {len(outcome.answers)} answers")
    report.check(f"{name}: no wrong token", not wrong, f"{len(wrong)} differ" if wrong else "")
    report.note(f"{name}: {len(hit) - len(cut)} went on to their end, {len(cut)} ended in an error: {_kinds(cut)}")
    report.check(f"{name}: answered again, without anybody's help", not refused, "; ".join(refused[:2]))
    report.check(f"{name}: healthy and drafting again", outcome.settled)


def _kinds(answers: list[Answer]) -> str:
    return "; ".join(sorted({str(one.error) for one in answers})) or "none"


def judge_stop(outcome: Outcome, report: Report, texts: dict[int, str], exit_codes: dict[str, int]) -> None:
    """Of the whole system under streams. An exit code of 137: killed, as its stop_grace_period was over."""
    hit, name = outcome.hit(), outcome.fault
    whole = [one for one in hit if one.error is None and one.text == texts[one.prompt]]
    cut = [str(one.error) for one in outcome.answers if one not in hit and one.error is not None and one.times]
    cut += [one.error or "another text" for one in hit if one not in whole]
    report.check(f"{name}: streams were under way", len(hit) > 0, f"{len(hit)} streams")
    report.check(f"{name}: they came to their end, and no other was begun and cut off", not cut, "; ".join(cut[:2]))
    failed = {service: code for service, code in exit_codes.items() if code}
    report.check(f"{name}: every container ended by itself, with exit code 0", not failed, str(failed or exit_codes))


def show(outcomes: list[Outcome]) -> None:
    rows = [("fault", "streams hit", "longest pause of each, median s", "of all, s", "drafts back after s")]
    for one in outcomes:
        pauses = one.pauses() or [0.0]
        seconds = (statistics.median(pauses), pauses[-1], one.without_drafts())
        rows.append((one.fault, str(len(one.hit())), *(f"{value:.1f}" for value in seconds)))
    rows.insert(1, ("---",) * 5)
    print("", *(f"| {' | '.join(row)} |" for row in rows), "", sep="\n", flush=True)
