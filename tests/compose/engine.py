"""One compose project on a Docker engine, and the images that can be had there."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
LABEL = "com.docker.compose.project"


def run(command: Sequence[str], timeout_s: float = 60, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(command), capture_output=True, text=True, timeout=timeout_s, check=False, **more)


def output(command: Sequence[str], timeout_s: float = 60, **more: Any) -> str:
    """stdout of a command that must succeed. Raises RuntimeError with what it said."""
    done = run(command, timeout_s, **more)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(f"{shlex.join(command)} gave {done.returncode}: " + "\n".join(said[-20:]))
    return done.stdout


def reachable() -> str | None:
    """Why no engine can be used, or None."""
    if shutil.which("docker") is None:
        return "no docker command"
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        done = run(command, 20)
        if done.returncode:
            return f"{shlex.join(command)}: {done.stderr.strip().splitlines()[-1]}"
    return None


def on_ports() -> list[str]:
    """What to put before a command that is to reach published ports; for an engine in a network namespace."""
    return shlex.split(os.environ.get("COMPOSE_TEST_EXEC", ""))


def get(url: str, timeout_s: float = 10) -> tuple[int, str]:
    """(HTTP status, body) through a published port; status 0 when nobody answers."""
    done = run([*on_ports(), "curl", "-s", "-m", str(timeout_s), "-w", "\n%{http_code}", url], timeout_s + 5)
    body, _, status = done.stdout.rpartition("\n")
    return int(status or 0), body


def post(url: str, body: dict[str, Any], timeout_s: float = 60) -> tuple[int, str]:
    command = ["curl", "-s", "-m", str(timeout_s), "-w", "\n%{http_code}", "-H", "Content-Type: application/json"]
    done = run([*on_ports(), *command, "-d", json.dumps(body), url], timeout_s + 5)
    text, _, status = done.stdout.rpartition("\n")
    return int(status or 0), text


def post_many(url: str, body: dict[str, Any], num_requests: int) -> list[int]:
    """Return the HTTP status of each of so many requests, one after the other, up to the first that nobody answers."""
    command = ["curl", "-s", "-m", "20", "--fail-early", "-o", "/dev/null", "-w", "%{http_code}\n"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return [int(line) for line in run([*on_ports(), *command, f"{url}?[1-{num_requests}]"], 600).stdout.split()]


def has_image(name: str) -> bool:
    """Here already, or fetched now."""
    if run(["docker", "image", "inspect", name]).returncode == 0:
        return True
    return run(["docker", "pull", "-q", name], 600).returncode == 0


def package_sources(image: str) -> bool:
    """Whether apt-get in it knows where packages are."""
    look = "cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -q -i -E '^(deb|uris)'"
    return run(["docker", "run", "--rm", image, "sh", "-c", look]).returncode == 0


def python_stand_in(image: str, folder: Path) -> str:
    """`image` with the package sources of this machine; the name it then has."""
    for path in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"):
        if Path(path).exists():
            shutil.copy(path, folder / "debian.sources")
            break
    name = "outrider-test/python:3.11"
    dockerfile = REPO / "tests/compose/Dockerfile.python"
    output(
        ["docker", "build", "-q", "--build-arg", f"BASE={image}", "-t", name, "-f", str(dockerfile), str(folder)], 300
    )
    return name


@dataclass
class Project:
    """The clone in `folder` as a compose project."""

    folder: Path
    name: str
    files: list[str] = field(default_factory=lambda: ["docker-compose.yml"])

    def environment(self, commands: Path) -> Mapping[str, str]:
        """Return the environment in which a plain `docker compose` is of this project. commands: goes before PATH."""
        return {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_FILE": ":".join(self.files),
        }

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        return output([*self._command(), *arguments], timeout_s, cwd=self.folder)

    def attempt(self, *arguments: str) -> str | None:
        """What a command that must fail says; None when it does not fail."""
        done = run([*self._command(), *arguments], cwd=self.folder)
        return done.stdout + done.stderr if done.returncode else None

    def states(self) -> dict[str, str]:
        """By service: healthy, starting, unhealthy, or what its container is when it has no health."""
        return {one["Service"]: one["Health"] or one["State"] for one in self._containers()}

    def container_ids(self) -> dict[str, str]:
        """By service."""
        return {one["Service"]: one["ID"] for one in self._containers()}

    def started_at(self) -> dict[str, str]:
        """When each service's container was started, and which it is."""
        look = ["docker", "inspect", "-f", "{{.Id}} {{.State.StartedAt}}"]
        return {service: output([*look, container]).strip() for service, container in self.container_ids().items()}

    def exit_codes(self) -> dict[str, int]:
        """Return the exit code of each service that has ended; `check` always has."""
        lines = self.compose("ps", "-a", "--format", "json", "--status", "exited").splitlines()
        return {one["Service"]: one["ExitCode"] for one in map(json.loads, lines)}

    def python(self, service: str, code: str) -> str:
        """Run inside the service's container."""
        return self.compose("exec", "-T", service, "python", "-c", code)

    def left_over(self) -> dict[str, list[str]]:
        """What of it is on the engine, by kind."""
        own = ["--filter", f"label={LABEL}={self.name}"]
        asked = {"containers": ["ps", "-a"], "volumes": ["volume", "ls"], "networks": ["network", "ls"]}
        return {kind: output(["docker", *ask, "-q", *own]).split() for kind, ask in asked.items()}

    def _containers(self) -> list[dict[str, Any]]:
        lines = self.compose("ps", "-a", "--format", "json").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def _command(self) -> list[str]:
        return ["docker", "compose", "-p", self.name, *(part for name in self.files for part in ("-f", name))]
