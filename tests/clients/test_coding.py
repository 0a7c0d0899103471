"""Coding agents, unmodified, each on one task of three calls against a model that is scripted for it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.coding import ANSWER, CODERS, NOTED, NOTES, SUM, Coder, Place, final, written
from tests.clients.recording import recording

LIMIT_S = 240
"""A few seconds on a machine that does nothing else."""
URL = os.environ.get("OUTRIDER_CLIENTS_URL", "")
ROOT = Path(os.environ.get("OUTRIDER_CODERS", "."))
"""Where they work: the scripts have its path."""
PROGRAMS = (Path(sys.executable).parent, Path(__file__).parents[2] / ".work/clients/npm/node_modules/.bin")


def environment(coder: Coder, place: Place) -> dict[str, str]:
    """Nothing of the user's, and a proxy without anybody behind it for all hosts but this one."""
    kept = {"PATH": ":".join([*map(str, PROGRAMS), "/usr/local/bin", "/usr/bin", "/bin"]), "HOME": str(place.home)}
    nobody = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    here = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    quiet = {"DO_NOT_TRACK": "1", "TERM": "dumb", "NO_COLOR": "1", "LANG": "C.UTF-8", "SHELL": "/bin/bash"}
    return {**kept, **nobody, **here, **quiet, **coder.environment(place)}


def end_those_of(home: Path) -> None:
    """End what an agent left behind, as cline does its hub."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.parametrize("coder", CODERS, ids=lambda coder: coder.name)
def test_a_task_of_three_calls(coder: Coder) -> None:
    home, work = ROOT / coder.name / "home", ROOT / coder.name / "work"
    work.mkdir(parents=True)
    (work / NOTES).write_text(f"{NOTED}\n")
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    with recording(URL) as recorded:
        place = Place(recorded.url, home, work)
        for name, content in coder.files(place).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(content if isinstance(content, str) else json.dumps(content))
        home.mkdir(exist_ok=True)
        try:
            with (home / "out.txt").open("wb") as out:
                ended = subprocess.run(
                    coder.command(place),
                    cwd=work,
                    env=environment(coder, place),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT_S,
                    check=False,
                )
        finally:
            end_those_of(home)
    told = (home / "out.txt").read_text(errors="replace")
    (home / "requests.json").write_text(json.dumps(recorded.requests, indent=1))
    asked: list[Any] = [each for each in recorded.requests if each["path"].partition("?")[0] == coder.path]
    refused = [each for each in recorded.requests if each["status"] != 200]
    assert ended.returncode == 0 and not refused, (ended.returncode, told[-2000:], str(refused)[-2000:])
    assert (work / ANSWER).read_text().strip() == written(coder.name).strip(), told[-2000:]
    summed = subprocess.run(["cksum", ANSWER], cwd=work, capture_output=True, text=True, check=True).stdout
    assert (work / SUM).read_text() == summed
    tasks = [each for each in asked if "tools" in each["body"]]
    assert len(tasks) >= len(coder.script(ROOT)), told
    history = json.dumps(tasks[-1]["body"])
    assert NOTED in history and summed.split()[0] in history
    assert final(coder.name) in told
