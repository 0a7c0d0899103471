"""The engines that are compared, and an engine's process: start it, send it jobs, and stop it while others run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from benchmarks.common import REPO, WORK
from benchmarks.peers.protocol import Answer, Job, Setup

PEERS = WORK / "peers"
LLAMA_SERVER = "OUTRIDER_BENCH_LLAMA_SERVER"
"""Environment variable with the path of one's own llama-server."""
CLOSE_S = 60.0
"""Seconds that an engine has to end by itself."""
SETTLE_S = 0.1
"""Seconds for idle threads of the engine that ran last to fall asleep."""
VLLM_KV_CACHE_GIB = 1


@dataclass(frozen=True)
class Kind:
    """How an engine is run."""

    name: str
    script: str
    python: Path
    """Interpreter of its environment."""
    stops: bool = True
    """Whether all of it is one process group that can be stopped while others are measured."""
    options: dict[str, str] = field(default_factory=dict)


def kinds() -> list[Kind]:
    """List every engine that the table may have, ours first."""
    llama = {"program": str(llama_server()), "source": str(PEERS / "llamacpp/src/vendor/llama.cpp")}
    own = Path(sys.executable)
    return [
        Kind("Outrider", "outrider_", own, False, {"layout": "shared"}),
        Kind("Outrider, a core each", "outrider_", own, False, {"layout": "apart"}),
        Kind("transformers", "transformers_", own),
        Kind("vLLM", "vllm_", _python("vllm")),
        Kind("llama.cpp", "llamacpp", _python("llamacpp/venv"), options=llama),
        Kind("OpenVINO GenAI", "openvino_", _python("openvino")),
        Kind("onnxruntime-genai", "onnx_", _python("onnx")),
    ]


def _python(environment: str) -> Path:
    return PEERS / environment / "bin/python"


def llama_server() -> Path:
    """Return the user's own, that of `make peers`, or the one on the PATH; it may not exist."""
    built = PEERS / "llamacpp/bin/llama-server"
    return Path(os.environ.get(LLAMA_SERVER) or (built if built.exists() else shutil.which("llama-server") or built))


def missing(kind: Kind) -> str | None:
    """Return what stands in the way of running the engine, in a few words; None for nothing."""
    if not kind.python.exists():
        return "not installed (make peers)"
    if (program := kind.options.get("program")) and not Path(program).exists():
        return "llama-server not installed (make peers)"
    return None


def vllm_environment(python: Path, cores: Sequence[int]) -> dict[str, str]:
    """Return the variables of vLLM's build for CPUs, with one thread a core.

    It wants Intel's OpenMP and tcmalloc to be preloaded, where they are found.
    """
    folders = (python.parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu"))
    names = ("libiomp5.so", "libtcmalloc_minimal.so.4")
    found = [next((str(d / name) for d in folders if (d / name).exists()), None) for name in names]
    return {
        "LD_PRELOAD": ":".join(path for path in found if path),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_CACHE_GIB),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


class EngineFailed(Exception):
    """Raised when the process ended, or sent something else than an answer; the message says where its log lies."""


class EngineProcess:
    """An adapter that has loaded its models. It is stopped from then on, except during `run`."""

    def __init__(self, kind: Kind, setup: Setup, log: Path) -> None:
        self.kind = kind
        self._setup = replace(setup, options=setup.options | kind.options)
        self._log = log
        self._stream: IO[str] = log.open("w")
        env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        env |= vllm_environment(kind.python, setup.cores) if kind.script == "vllm_" else {}
        env |= {"PYTHONPATH": str(REPO)} if kind.script == "outrider_" else {}
        self._process = subprocess.Popen(
            [str(kind.python), str(REPO / f"benchmarks/peers/{kind.script}.py")],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stream,
            text=True,
            env=env,
            start_new_session=True,
        )

    def ready(self) -> str:
        """Wait until the adapter has loaded and return its version. Raises EngineFailed, with what it lacks."""
        self._send(asdict(self._setup))
        said = self._receive()
        if "lacks" in said:
            raise EngineFailed(said["lacks"])
        self._pause()
        return str(said["ready"])

    def run(self, job: Job) -> Answer | str:
        """Run a job and return its answer, or what the engine lacks for it."""
        self._resume()
        self._send(asdict(job))
        said = self._receive()
        self._pause()
        return said["lacks"] if "lacks" in said else Answer(**said)

    def close(self) -> None:
        """Let the engine end within CLOSE_S and kill what is left of its group, also when the wait is interrupted."""
        self._resume()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdout, self._stream):
                assert pipe is not None
                pipe.close()

    def _pause(self) -> None:
        if self.kind.stops:
            self._signal(signal.SIGSTOP)
        time.sleep(SETTLE_S)

    def _resume(self) -> None:
        if self.kind.stops:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"ended by itself, see {self._log}") from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"ended by itself, see {self._log}")
        return dict(json.loads(line))
