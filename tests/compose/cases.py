"""What an operator does on the first days, each by the commands of docs/deploy.md: what was started anew, how long it
took, and what `docker compose` printed.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from shutil import copytree

from tests.compose.checks import HTTP, Report, all_healthy, all_scraped, completion
from tests.compose.docs import Commands
from tests.compose.engine import REPO, Project, get, output, post_many
from tests.compose.load import METRICS, Load, undisturbed, wait_until

LIVES = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/cmdline") as file:
        if file.read().startswith("ray::WorkerActor"):
            print(pid, open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[19])
"""
"""Process id and start of a container's worker."""
UNTRACKED = {"check"}
"""Services that each `up` runs."""
SETTLE_S = 400.0
SILENT_S = 10.0
"""Seconds in which the restart policy would have started a container again."""
LOG_REQUESTS = 8000
"""Requests, a line of over 600 bytes each: more than the engine and the pipe hold, 1 MB, and MAX_WAITING_LINES."""
DROPPED = "outrider_log_lines_dropped_total"
STALLED_LOG = """
services:
  gateway:
    logging: !override
      driver: syslog
      options: {{syslog-address: "unixgram://{socket}", mode: blocking}}
"""
"""A log driver in blocking mode. Nobody reads the socket."""
CASES = ("settings", "pools", "slips", "killed", "stalled-log", "models", "stop", "tls")
"""In their order. After `stop` nothing runs; `tls` starts it again."""
PARTS = ("OUTRIDER_GATEWAY_MAX_QUEUE=201", "OUTRIDER_TARGET_MAX_SLOTS=60", "OUTRIDER_DRAFT_MAX_SLOTS=60")


class State:
    """What runs at one time."""

    def __init__(self, project: Project) -> None:
        self.containers = project.started_at()
        running = project.states()
        self.lives = {one: project.python(one, LIVES).strip() for one in ("draft", "target") if one in running}

    def started_since(self, before: "State") -> set[str]:
        """Return the services whose container is another, and the workers, as `draft's worker`, whose process is."""
        anew = {name for name, now in self.containers.items() if before.containers.get(name) != now}
        anew |= {f"{name}'s worker" for name, now in self.lives.items() if now and now != before.lives.get(name)}
        return anew - UNTRACKED


class Cases:
    """Each method is a case; they are run one after the other on one system."""

    def __init__(self, project: Project, report: Report, commands: Commands, load: Load) -> None:
        self._project = project
        self._report = report
        self._commands = commands
        self._load = load

    def run(self, name: str, texts: dict[int, str]) -> None:
        """Run one of CASES but `stop`. texts: of the streams without a disturbance."""
        cases: dict[str, Callable[[], None]] = {
            "settings": lambda: self.settings(texts),
            "pools": lambda: self.pools(texts),
            "slips": self.slips,
            "killed": self.killed,
            "stalled-log": self.stalled_log,
            "models": self.models,
            "tls": self.tls_and_keys,
        }
        cases[name]()

    def images(self, before: set[str]) -> None:
        """before: those that were there before the build, and may have lost their names to it."""
        left = images("--filter", "dangling=true") - before
        self._report.check("images are built once", not left, f"{len(left)} without a name" if left else "")

    def settings(self, texts: dict[int, str]) -> None:
        """A line in .env, under streams, for each part."""
        expected = ({"gateway"}, {"launcher", "target's worker"}, {"launcher", "draft's worker"})
        for line, anew in zip(PARTS, expected, strict=True):
            self._change(line, anew, texts, partial(self._add, line))

    def pools(self, texts: dict[int, str]) -> None:
        """The file of pools, named and then edited, under streams."""
        heading = "A model of your own"
        self._change("a file of pools", {"launcher"}, texts, lambda: self._commands.run(heading, 2))
        file = self._project.folder / "pools.yaml"
        edited = re.sub("(?m)^( +)port: 7200$", r"\1port: 7200\n\1max_slots: 50", file.read_text())

        def edit() -> object:
            file.write_text(edited)
            return self._commands.run("Settings and changes", 1)

        self._change("an edited file of pools, restart launcher", {"launcher", "target's worker"}, texts, edit)
        settings = self._project.folder / ".env"
        settings.write_text(settings.read_text().replace("OUTRIDER_CLUSTER_FILE=./pools.yaml\n", ""))
        # The next case finds running what .env says: an `up` that is refused stops what differs.
        again = partial(self._commands.shell, "docker compose up -d --wait")
        self._change("the file of pools left out again", {"launcher", "target's worker"}, texts, again)

    def slips(self) -> None:
        """What is wrong in .env ends the command; a look beforehand says so, too."""
        for line, sentence in (
            ("OUTRIDER_GATEWAY_MAX_QUUE=1", "did you mean OUTRIDER_GATEWAY_MAX_QUEUE?"),
            ("OUTRIDER_BNID=0.0.0.0", "did you mean OUTRIDER_BIND?"),
        ):
            with self._env(line):
                done = self._commands.run("Settings and changes")
                said = done.returncode != 0 and sentence in done.stdout
                self._report.check(f"{line}: docker compose run --rm check", said, _last(done.stdout))
                self._refused(line, "docker compose up -d --wait", 'service "check" didn\'t complete', sentence)

    def models(self) -> None:
        """One's own, without a draft, with one, with a wrong path, and a folder that holds none."""
        place = self._commands.place("/srv/models")
        for name, role in (("my-model", "target"), ("my-draft", "draft")):
            copytree(REPO / "models/demo" / role, place / name)
        heading = "A model of your own"
        for number, drafts in ((0, False), (1, True)):
            self._serves(self._commands.blocks[heading][number].strip(), number, drafts)
        wrong = "MODEL=/srv/models/my-modle docker compose up -d --wait".replace("/srv/models", str(place))
        self._refused("a path that is not there", wrong, "bind source path does not exist", "my-modle")
        (place / "empty").mkdir()
        empty = f"MODEL={place}/empty docker compose up -d --wait"
        self._refused("a folder without a model", empty, "bind source path does not exist", "empty/config.json")
        self._up("the demo pair again", "docker compose up -d --wait")

    def tls_and_keys(self) -> None:
        """As the documents have it; Prometheus is told nothing."""
        begun = time.monotonic()
        self._commands.place("/a/safe").mkdir(parents=True)
        done = self._commands.run("TLS")
        took = f"{time.monotonic() - begun:.0f} s"
        served = '"outrider-demo"' in done.stdout
        self._report.check("TLS: HTTPS for users, by the CA", served, f"{took}; {_last(done.stdout)}")
        self._report.check("TLS: all healthy", self._wait_healthy(), str(self._project.states()))
        found = all_scraped(60)
        self._report.check("TLS: Prometheus scrapes every part", set(found.values()) == {"up"}, str(found))
        tracked = output(["git", "status", "--porcelain", "--untracked-files=no"], cwd=self._project.folder)
        self._report.check("TLS: no tracked file was edited", not tracked, tracked)
        done = self._commands.run("API keys")
        key = re.findall(r"^or-\S+", done.stdout, re.MULTILINE)
        curl = "curl -s --cacert deploy/docker/secrets/ca.pem https://localhost:8000/v1/models"
        without = self._commands.shell(f"{curl} -o /dev/null -w '%{{http_code}}'").stdout
        having = self._commands.shell(f"{curl} -H 'Authorization: Bearer {key[0] if key else ''}'").stdout
        holds = without == "401" and "outrider-demo" in having
        self._report.check("keys: 401 without one, the models with it", holds, f"{without}; {having[:80]}")

    def killed(self) -> None:
        """`docker kill` is somebody's wish, which the restart policy heeds."""
        output(["docker", "kill", self._project.container_ids()["gateway"]])
        time.sleep(SILENT_S)
        stays = self._project.states()["gateway"] == "exited"
        self._report.check("docker kill gateway: not started again by itself", stays, str(self._project.states()))
        self._up("docker compose up -d --wait starts it again", "docker compose up -d --wait")

    def stalled_log(self) -> None:
        """A log driver in blocking mode whose collector never reads."""
        place = self._commands.place("stalled-log.sock")
        override = place.with_suffix(".yml")
        override.write_text(STALLED_LOG.format(socket=place))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as collector:
            collector.bind(str(place))
            self._project.files.append(str(override))
            try:
                self._up("a stalled log driver: up", "docker compose up -d --wait")
                begun = time.monotonic()
                statuses = post_many(f"{HTTP}/v1/completions", {"prompt": "a", "max_tokens": 1}, LOG_REQUESTS)
                num_served = statuses.count(200)
                took = f"{num_served} of {LOG_REQUESTS} in {time.monotonic() - begun:.0f} s"
                self._report.check("a stalled log driver: requests are served", num_served == LOG_REQUESTS, took)
                self._report.check("a stalled log driver: /healthz", get(f"{HTTP}/healthz")[0] == 200)
                num_dropped = _metric(DROPPED)
                dropped = f"{num_dropped:.0f} lines"
                self._report.check("a stalled log driver: lines are dropped and counted", num_dropped > 0, dropped)
            finally:
                self._project.files.pop()
        self._up("another log driver", "docker compose up -d --wait")

    def _change(self, name: str, expected: set[str], texts: dict[int, str], change: Callable[[], object]) -> None:
        """Make a change under streams: nothing but `expected` is started anew, and the streams come to their end."""
        before = State(self._project)
        errors: list[str] = []

        def stream() -> None:
            try:
                if undisturbed(self._load) != texts:
                    errors.append("other texts")
            except RuntimeError as error:
                errors.append(str(error))

        streams = threading.Thread(target=stream)
        streams.start()
        self._wait_running()
        begun = time.monotonic()
        change()
        took_s = time.monotonic() - begun
        done = wait_until(lambda: State(self._project).started_since(before) >= expected, SETTLE_S)
        served = self._wait_served() and done
        served_s = time.monotonic() - begun
        streams.join()
        anew = State(self._project).started_since(before)
        detail = f"{', '.join(sorted(anew))}; the command {took_s:.0f} s, served again after {served_s:.0f} s"
        self._report.check(f"{name}: starts anew what it concerns alone", served and anew == expected, detail)
        whole = f"{name}: streams under way came to their end, every text as without it"
        self._report.check(whole, not errors, "; ".join(errors))

    def _add(self, line: str) -> object:
        with (self._project.folder / ".env").open("a") as file:
            file.write(f"{line}\n")
        return self._commands.shell("docker compose up -d --wait")

    @contextmanager
    def _env(self, line: str) -> Iterator[None]:
        file = self._project.folder / ".env"
        before = file.read_text()
        file.write_text(f"{before}{line}\n")
        yield
        file.write_text(before)

    def _refused(self, name: str, command: str, printed: str, sentence: str) -> None:
        """A command that ends soon, says why, and leaves what runs as it is."""
        before = State(self._project)
        begun = time.monotonic()
        done = self._commands.shell(command)
        took = f"{time.monotonic() - begun:.1f} s"
        said = done.stdout + self._commands.shell("docker compose logs --no-color --tail 3 check").stdout
        lines = [line for line in said.splitlines() if printed in line or sentence in line]
        holds = done.returncode != 0 and printed in done.stdout and sentence in said
        self._report.check(
            f"{name}: refused within seconds", holds, f"{took}: {' / '.join(lines) or _last(done.stdout)}"
        )
        anew = State(self._project).started_since(before)
        self._report.check(f"{name}: what runs goes on", not anew and self._wait_healthy(), ", ".join(anew))

    def _serves(self, name: str, number: int, drafts: bool) -> None:
        begun = time.monotonic()
        done = self._commands.run("A model of your own", number)
        served = self._wait_served()
        took = f"{time.monotonic() - begun:.0f} s"
        states = self._project.states()
        has_draft = states.get("draft") == "healthy"
        _, body = get(f"{HTTP}/v1/models")
        named = [one["id"] for one in json.loads(body).get("data", ())] if served else []
        holds = done.returncode == 0 and named == ["my-model"] and has_draft is drafts
        self._report.check(name, holds, f"{took}; serves {named}; {states}; {_last(done.stdout)}")
        completion(self._report, "my-model")

    def _up(self, name: str, command: str) -> None:
        begun = time.monotonic()
        done = self._commands.shell(command)
        detail = f"{time.monotonic() - begun:.0f} s; {_last(done.stdout)}"
        self._report.check(name, done.returncode == 0 and self._wait_healthy(), detail)

    def _wait_running(self) -> None:
        wait_until(lambda: _metric("vllm:num_requests_running") >= self._load.num_lines, 60)

    def _wait_healthy(self) -> bool:
        return wait_until(lambda: all_healthy(self._project), SETTLE_S)

    def _wait_served(self) -> bool:
        return wait_until(lambda: get(f"{HTTP}/readyz")[0] == 200 and all_healthy(self._project), SETTLE_S)


def images(*filters: str) -> set[str]:
    return set(output(["docker", "images", "-q", *filters]).split())


def _metric(name: str) -> float:
    """Return the sum over all series of a metric of the gateway."""
    _, text = get(f"{METRICS}/metrics")
    values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def _last(printed: str) -> str:
    return (printed.strip().splitlines() or [""])[-1].strip()
