"""`outrider up` as a user runs it: what it serves, how it ends, and that nothing is left, however it ends."""

import os
import re
import shutil
import signal
import socket
import ssl
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.e2e.process_tree import Command, Tree, tree

PLAIN = ("--no-ray", "--port", "0", "--grpc-port", "0")
ROLES = ("target", "draft")
WITH_RAY = ("--port", "0", "--grpc-port", "0")


def outrider(*args: str) -> Command:
    return Command("-c", "from outrider.cli.main import main; main()", *args)


def up(*args: str) -> Command:
    return outrider("up", *args)


def succeeds(*args: str) -> None:
    command = outrider(*args)
    try:
        assert command.wait() == 0, command.log()
    finally:
        command.end()


def http_of(command: Command) -> str:
    """Base URL, once the command says that it serves."""
    found = re.search(r"http://[\d.]+:\d+", command.wait_for("HTTP"))
    assert found is not None, command.log()
    return found[0]


def complete(url: str, prompt: str = "import os\n\ndef ") -> dict[str, object]:
    """K is given: what pays depends on the machine."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "speculation": {"num_draft_tokens": 5}}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def shakes_hands(role: str, address: str, ca: Path) -> None:
    """Raises SSLError unless who listens there shows the certificate of that role."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        context.wrap_socket(plain, server_hostname=f"{role}.outrider.internal").close()


def assert_nothing_left(left: Tree, within_s: float) -> None:
    assert left.wait_empty(within_s) == {}


@pytest.mark.parametrize(
    "args", [pytest.param(WITH_RAY, id="ray"), pytest.param(PLAIN, id="no-ray", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(300)
def test_it_serves_and_ctrl_c_leaves_no_process(args: tuple[str, ...]) -> None:
    with tree() as left:
        command = up(*args)
        try:
            url = http_of(command)
            assert httpx.get(f"{url}/readyz").status_code == 200
            assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["outrider-demo"]
            assert complete(url)["usage"]["speculation"]["num_draft_tokens"] > 0  # type: ignore[index]
            assert bool(left.pids_of("raylet")) == (args == WITH_RAY)
            if args == PLAIN and len(os.sched_getaffinity(0)) > 1:
                target, draft = (os.sched_getaffinity(left.pids_of(f"{role}_service")[0]) for role in ROLES)
                assert not target & draft
            command.signal(signal.SIGINT)
            assert command.wait() == 0, command.log()
            assert left.now() == {}
        finally:
            command.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_a_folder_of_certificates_all_parts_speak_tls(tmp_path: Path) -> None:
    """The draft is one without a model, which Ray places as any other."""
    succeeds("certs", str(tmp_path))
    with tree() as left:
        command = up(*WITH_RAY, "--tls-dir", str(tmp_path), "--draft", "ngram")
        try:
            workers = dict(re.findall(r"(target|draft)-0 (\S+:\d+)", command.wait_for("ready  target-0")))
            url = http_of(command)
            (registry,) = re.findall(r"registry  (\S+)", command.wait_for("registry  "))
            for role, address in {**workers, "launcher": registry}.items():
                shakes_hands(role, address, tmp_path / "ca.pem")
            said = complete(url, "import os\nimport os\nimport os\n")["usage"]["speculation"]  # type: ignore[index]
            assert said["num_draft_tokens"] > 0
            succeeds("scale", "--registry", registry, "--tls-dir", str(tmp_path / "launcher"))
            command.signal(signal.SIGINT)
            assert command.wait() == 0, command.log()
            assert left.now() == {}
        finally:
            command.end()


@pytest.mark.slow
def test_a_killed_launcher_is_reported_and_takes_ray_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = Path(tempfile.mkdtemp(prefix="t-"))  # short: Ray's sockets lie below it
    monkeypatch.setenv("TMPDIR", str(folders))

    def sessions() -> list[Path]:
        """Not the folder of locks, which every system of the user shares."""
        return [path for path in folders.glob("outrider-*") if path.name != f"outrider-{os.getuid()}"]

    with tree() as left:
        command = up(*WITH_RAY)
        try:
            http_of(command)
            assert len(sessions()) == 1
            os.kill(left.pids_of("deploy.launcher")[0], signal.SIGKILL)
            assert command.wait() == 1
            assert "launcher was ended by signal 9" in command.log()
            assert left.now() == {}
            assert sessions() == []
        finally:
            command.end()
            shutil.rmtree(folders)


@pytest.mark.parametrize("args", [pytest.param(WITH_RAY, id="ray"), pytest.param(PLAIN, id="no-ray")])
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_when_it_is_killed_itself_nothing_outlives_it_for_long(args: tuple[str, ...]) -> None:
    with tree() as left:
        command = up(*args)
        try:
            http_of(command)
            command.signal(signal.SIGKILL)
            command.wait()
            assert_nothing_left(left, within_s=60)
        finally:
            command.end()


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("gateway: {api_keys: /nowhere.yaml}", "api_keys: cannot read /nowhere.yaml: No such file"),
        ("ray: {target_gpus: 1}", "ray.target_gpus is no setting; known: "),
    ],
)
def test_bad_settings_that_show_at_the_start_are_one_line_too(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "system.yaml"
    file.write_text(yaml)
    with tree() as left:
        command = up("--config", str(file))
        assert command.wait() == 1
        assert len(command.err) == 1, command.log()
        assert message in command.err[0]
        assert left.now() == {}
        command.end()
