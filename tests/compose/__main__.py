"""`make compose-test`: the compose file on a real Docker engine, from a clean clone, with parts killed under load.

Then an operator's first days, by the commands of docs/deploy.md as they stand: settings and pools changed under
streams, slips, models of one's own, TLS and keys. Prints a line for each check, and how long recoveries took; exit code
1 when a check failed, 3 without an engine. The engine is DOCKER_HOST's. COMPOSE_TEST_EXEC: put before commands that
reach published ports, such as nsenter --net=..., for an engine in a network namespace. Where the images of Prometheus
and Grafana cannot be fetched, a stand-in from Debian's package is built for the first, and the second is left out; the
output says so.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.compose.cases import CASES, Cases, images
from tests.compose.checks import (
    HTTP,
    Report,
    all_healthy,
    all_scraped,
    completion,
    judge,
    judge_drain,
    judge_ends,
    judge_stop,
    rights,
    show,
)
from tests.compose.docs import Commands
from tests.compose.engine import REPO, Project, has_image, output, package_sources, python_stand_in, reachable
from tests.compose.load import Load, Outcome, under_load, undisturbed

PYTHON, PROMETHEUS, GRAFANA = "python:3.11-slim", "prom/prometheus:v3.5.3", "grafana/grafana:11.6.0"
SETTLE_S = 240.0
DRAIN_S = 300
STOP_GRACE_S = 320
LOG = REPO / ".work" / "compose-test.log"
KILL = """
import os, signal, time
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/cmdline") as file:
        if file.read().replace("\\0", " ").startswith("%s"):
            found.append(int(pid))
print(*found, flush=True)
if os.fork() == 0:  # this script has ended by then: its whole container may go with them
    for descriptor in range(3):
        os.close(descriptor)
    time.sleep(0.5)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
"""
WORKER, LAUNCHER = "ray::WorkerActor", "python -m deploy.launcher"
HEAD = "/opt/venv/lib/python3.11/site-packages/ray/core/src/ray/gcs/gcs_server"
PARTS = ("draft", "target", "launcher", "ray-head", "gateway")


def clone(folder: Path) -> None:
    output(["git", "clone", "-q", "--no-hardlinks", str(REPO), str(folder)], 120)


def settings(project: Project, report: Report, scratch: Path) -> None:
    """.env of the clone, and the stand-ins for images that cannot be had."""
    values: dict[str, object] = {
        "OUTRIDER_IMAGE_GATEWAY": "outrider-test/gateway",
        "OUTRIDER_IMAGE_WORKER": "outrider-test/worker",
        # The same tokens in every batch: texts are compared.
        "OUTRIDER_TARGET_BATCH_INVARIANT": "true",
        "OUTRIDER_GATEWAY_LOG_FORMAT": "json",
        # Streams that are under way at the stop come to their end, on a slow machine as well.
        "OUTRIDER_GATEWAY_DRAIN_TIMEOUT_S": DRAIN_S,
        "OUTRIDER_TARGET_DRAIN_TIMEOUT_S": DRAIN_S,
        "OUTRIDER_DRAFT_DRAIN_TIMEOUT_S": DRAIN_S,
        "OUTRIDER_STOP_GRACE": f"{STOP_GRACE_S}s",
    }
    if not has_image(PYTHON):
        raise RuntimeError(f"{PYTHON} is neither on the engine nor to be fetched")
    if not package_sources(PYTHON):
        values["PYTHON_IMAGE"] = python_stand_in(PYTHON, scratch)
        report.note(f"{PYTHON} here has no package sources: built from a stand-in with this machine's")
    if not has_image(PROMETHEUS):
        project.files.append("tests/compose/prometheus.yml")
        report.note(f"{PROMETHEUS} cannot be fetched: a stand-in from Debian's package")
    if not has_image(GRAFANA):
        project.files.append("tests/compose/no-grafana.yml")
        report.note(f"{GRAFANA} cannot be fetched: left out, so dashboards are not shown here")
    (project.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))


def faults(project: Project, report: Report, load: Load, texts: dict[int, str], parts: list[str]) -> list[Outcome]:
    stopped_at: dict[str, float] = {}

    def kill_process(service: str, command: str) -> None:
        if not project.python(service, KILL % command).split():
            raise RuntimeError(f"no process {command} in {service}")

    def kill_container(service: str) -> None:
        project.compose("kill", service)
        time.sleep(2)
        project.compose("start", service)

    def stop_container(service: str) -> None:
        project.compose("stop", service, timeout_s=STOP_GRACE_S + 60)
        stopped_at[service] = time.time()
        codes = project.exit_codes()
        report.check(
            f"compose stop {service} under streams: exit code 0", codes == {"check": 0, service: 0}, str(codes)
        )
        project.compose("start", service)

    def struck(name: str, fault: Callable[[], None]) -> Outcome:
        outcome = under_load(load, name, fault, partial(all_healthy, project), SETTLE_S)
        outcomes.append(outcome)
        if not outcome.settled:
            report.note(f"states: {project.states()}")
        return outcome

    outcomes: list[Outcome] = []
    for service in [one for one in ("draft", "target") if one in parts]:
        for name, fault in (
            (f"{service}'s process killed", partial(kill_process, service, WORKER)),
            (f"compose kill {service}, start", partial(kill_container, service)),
            (f"compose stop {service}, start", partial(stop_container, service)),
        ):
            judge(struck(name, fault), report, texts, served_meanwhile=service == "draft")
    if "target" in stopped_at:
        judge_drain(outcomes[-1], report, stopped_at["target"])
    if "launcher" in parts:
        outcome = struck("the launcher killed", partial(kill_process, "launcher", LAUNCHER))
        judge(outcome, report, texts, served_meanwhile=True)
    if "ray-head" in parts:
        # The restart policy starts it again, as the head of another cluster.
        judge_ends(struck("Ray's head killed", partial(kill_process, "ray-head", HEAD)), report, texts)
    if "gateway" in parts:
        judge_ends(struck("compose kill gateway, start", partial(kill_container, "gateway")), report, texts)
    return outcomes


def test(project: Project, report: Report, commands: Commands, load: Load, parts: list[str], cases: list[str]) -> None:
    images_before = images()
    begun = time.monotonic()
    done = commands.run("docker compose")
    print(done.stdout, file=sys.stderr, flush=True)
    report.check(
        "docker compose up -d --build --wait, and a completion",
        done.returncode == 0 and all_healthy(project),
        f"{time.monotonic() - begun:.0f} s; {project.states()}",
    )
    errors = re.findall(r"^ \S+ Error .*$", done.stdout, re.MULTILINE)
    report.check("docker compose up prints no error", not errors, "; ".join(errors[:2]))
    made = Cases(project, report, commands, load)
    made.images(images_before)
    completion(report)
    rights(project, report)
    found = all_scraped(60)
    report.check("Prometheus scrapes every part", set(found.values()) == {"up"} and len(found) == 3, str(found))
    texts = undisturbed(load)
    outcomes = faults(project, report, load, texts, parts)
    found = all_scraped(60)
    report.check("Prometheus scrapes every part again", set(found.values()) == {"up"} and len(found) == 3, str(found))
    for name in [one for one in CASES if one in cases]:
        if name == "stop":
            stop = under_load(load, "docker compose stop", partial(stop_all, project), lambda: False, 0)
            judge_stop(stop, report, texts, project.exit_codes())
        else:
            made.run(name, texts)
    show(outcomes)


def stop_all(project: Project) -> None:
    project.compose("stop", timeout_s=STOP_GRACE_S + 120)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=1500, help="of each; enough to outlast a fault")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="those that are killed and stopped")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES, help="of an operator's first days")
    parser.add_argument("--keep", action="store_true", help="leave the containers as they are at the end")
    options = parser.parse_args(argv)
    reason = reachable()
    if reason is not None:
        print(f"no Docker engine: {reason}; set DOCKER_HOST", file=sys.stderr)
        return 3
    report = Report()
    with tempfile.TemporaryDirectory(prefix="outrider-compose-") as scratch:
        project = Project(Path(scratch) / "clone", "outrider-test")
        clone(project.folder)
        settings(project, report, Path(scratch))
        try:
            load = Load(HTTP, options.streams, options.tokens)
            commands = Commands(project, Path(scratch))
            test(project, report, commands, load, options.parts, options.cases)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            report.check("the test came to its end", False, str(error))
        finally:
            if report.num_failed:
                LOG.parent.mkdir(exist_ok=True)
                LOG.write_text(project.compose("logs", "--no-color", "--timestamps"))
                report.note(f"logs of all containers: {LOG}")
            if not options.keep:
                project.compose("down", "-v", timeout_s=600)
                left = {kind: found for kind, found in project.left_over().items() if found}
                report.check("docker compose down -v leaves nothing", not left, str(left or ""))
    failed = f", {report.num_failed} failed" if report.num_failed else ", none failed"
    print(f"{report.num_checks} checks{failed}")
    return min(report.num_failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
