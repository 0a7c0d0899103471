"""Run llama.cpp's server, once with the draft, or with n-grams where there is none, and once without. Both over HTTP on
this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol import NGRAM, Answer, Job, Lacks, Setup, serve

START_S = 120.0
UNTOUCHED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
"""Settings that sample from the whole distribution."""


class Server:
    """A llama-server on a port of its own."""

    def __init__(self, program: str, arguments: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [program, "--host", "127.0.0.1", "--port", str(port), *arguments]
        self._process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
        self._await_health()

    def _await_health(self) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        self.stop()
        raise Lacks("llama-server did not start; its log says why")

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        program, source = setup.options["program"], Path(setup.options["source"])
        target = _converted(setup, source, "target")
        threads, slots = str(len(setup.cores)), setup.max_concurrency
        common = ["-m", str(target), "-t", threads, "-tb", threads, "-np", str(slots), "--no-webui"]
        common += ["-c", str(slots * setup.context), "--no-warmup", "-ctk", "f32", "-ctv", "f32"]
        if setup.dtype == "bfloat16":
            common[-3], common[-1] = "bf16", "bf16"
        drafting = ["--spec-draft-n-max", str(setup.num_draft_tokens)]
        self._has_model = bool(setup.draft)
        if self._has_model:
            drafting += ["--spec-type", "draft-simple", "-md", str(_converted(setup, source, "draft"))]
            drafting += ["--spec-draft-threads", threads, "-ctkd", common[-3], "-ctvd", common[-1]]
        else:
            drafting += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM)]
            drafting += ["--spec-ngram-simple-size-m", str(setup.num_draft_tokens)]
        self.version = _version(program)
        self._plain, self._drafted = Server(program, common), Server(program, [*common, *drafting])

    def run(self, job: Job) -> Answer:
        server = self._drafted if job.speculative else self._plain
        body = {"n_predict": job.max_tokens, "temperature": job.temperature, "seed": job.seed, "cache_prompt": False}
        body |= {"ignore_eos": True, "return_tokens": True, "samplers": ["temperature"]} | UNTOUCHED
        started = time.perf_counter()
        with ThreadPoolExecutor(job.concurrency) as pool:
            replies = list(pool.map(lambda ids: server.complete({**body, "prompt": ids}), job.prompts))
        elapsed = time.perf_counter() - started
        timings = [reply["timings"] for reply in replies]
        if job.speculative and self._has_model and not any(each.get("draft_n") for each in timings):
            raise Lacks("llama-server loaded the draft and did not use it")
        drafted = sum(each.get("draft_n", 0) for each in timings)
        accepted = sum(each.get("draft_n_accepted", 0) for each in timings)
        outputs = [reply["tokens"] for reply in replies]
        return Answer(outputs, elapsed, drafted or None, accepted if drafted else None)

    def close(self) -> None:
        self._plain.stop()
        self._drafted.stop()


def _version(program: str) -> str:
    made = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return "llama.cpp " + (made.stderr + made.stdout).strip().splitlines()[0].removeprefix("version: ")


def _converted(setup: Setup, source: Path, role: str) -> Path:
    out = Path(setup.folder) / f"{role}-{setup.dtype}.gguf"
    if not out.exists():
        partial = out.with_suffix(".partial")
        script = Path(__file__).with_name("to_gguf.py")
        command = [sys.executable, str(script), str(source), getattr(setup, role), str(partial), setup.dtype]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        shutil.move(partial, out)
    return out


if __name__ == "__main__":
    serve(LlamaCpp)
