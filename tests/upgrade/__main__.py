"""`make upgrade-test BASE=COMMIT`: a fleet of that commit, replaced part by part by this one's while answers stream.

Two targets, a draft and a gateway; as docs/releases.md says, the gateway first, then each worker.

Prints a line for each part. Exit code 1 when an answer is lost, or is another than before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.e2e.registry_load import Load, asked_at
from tests.forked import REPO, clean_environment
from tests.stack import DEMO_DRAFT, DEMO_TARGET, KV_CACHE_TOKENS

NUM_CLIENTS = 3
MAX_TOKENS = 1500
"""Of an answer, seconds of it: it is under way while a part is replaced."""
LOG = REPO / ".work" / "upgrade-test.log"
DRAIN_S = 1
"""Of workers: less than an answer takes, so that it goes on elsewhere. Gateways wait for all that they have."""
SLOW_S = 600.0
"""How long an answer may take before it counts as lost: a machine that does much else loads a worker for minutes."""


class Part:
    """A process of a fleet, with the code of `tree`."""

    def __init__(self, tree: Path, module: str, *args: str) -> None:
        self.args, self._module = args, module
        environment = clean_environment() | {"PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", module, *args]
        with LOG.open("a") as log:
            self._process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        ready = json.loads(self._process.stdout.readline() or "{}")
        self.address = str(ready["grpc" if module == "gateway" else "address"])

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(120)
        assert code == 0, f"{self._module} ended with {code}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def replaced(self, tree: Path) -> Part:
        """Stop it; return one with other code at the same address."""
        self.stop()
        return Part(tree, self._module, *self.args, "--port", self.address.rpartition(":")[2])


@contextlib.asynccontextmanager
async def asked(gateway: Part) -> AsyncIterator[Load]:
    """With answers under way all the time, and until each has ended."""
    load = Load(MAX_TOKENS)
    async with asked_at(gateway.address, load, NUM_CLIENTS, SLOW_S):
        await load.drafted_again(SLOW_S)
        yield load


async def upgrade(before: Path, parts: list[Part]) -> list[str]:
    """Return the texts of all answers. parts: those that run, for whoever cleans up."""

    async def start(tree: Path, module: str, *args: str) -> Part:
        parts.append(await asyncio.to_thread(Part, tree, module, *args))
        return parts[-1]

    common = ("--kv-cache-tokens", KV_CACHE_TOKENS, "--drain-timeout-s", str(DRAIN_S))
    targets = [await start(before, "target_service", "--model", DEMO_TARGET, "--batch-invariant", *common)]
    targets += [await start(before, "target_service", "--model", DEMO_TARGET, "--batch-invariant", *common)]
    draft = await start(before, "draft_service", "--model", DEMO_DRAFT, *common)
    workers = ("--target", ",".join(one.address for one in targets), "--draft", draft.address)
    ours = ("--port", "0", "--grpc-port", "0", "--drain-timeout-s", "120", "--num-draft-tokens", "5", *workers)
    old = await start(before, "gateway", *ours)
    texts: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        load = await stack.enter_async_context(asked(old))
        new = await start(REPO, "gateway", *ours)
        load.is_over = True  # a load balancer sends to the new one from now on
        await asyncio.to_thread(old.stop)
    texts += said("gateway", load)
    for name, worker in (("target", targets[0]), ("the other target", targets[1]), ("draft", draft)):
        async with asked(new) as load:
            parts.append(await asyncio.to_thread(worker.replaced, REPO))
            await load.drafted_again(SLOW_S)
        texts += said(name, load)
    return texts


def said(name: str, load: Load) -> list[str]:
    """Print how it went. Raises AssertionError where an answer was lost."""
    assert not load.errors, f"{name}: {len(load.errors)} answers lost: {load.errors[0]}"
    sys.stdout.write(f"{name} replaced: {len(load.texts)} answers, none lost\n")
    sys.stdout.flush()
    return load.texts


def main() -> int:
    parser = argparse.ArgumentParser(prog="make upgrade-test", description=__doc__)
    parser.add_argument("base", help="the commit, branch or tag that runs before")
    commit = parser.parse_args().base
    named = ["git", "-C", REPO, "rev-parse", "-q", "--verify", f"{commit}^{{commit}}"]
    known = subprocess.run(named, capture_output=True)
    if known.returncode:
        parser.error(f"{commit!r} is no commit, branch or tag of {REPO}; name the release to upgrade from: BASE=v0.1.0")
    began, parts = time.monotonic(), list[Part]()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")  # each part adds to it
    sys.stdout.write(f"logs of all parts: {LOG}\n")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", REPO, folder], check=True)
        subprocess.run(["git", "-C", folder, "-c", "advice.detachedHead=false", "checkout", "-q", commit], check=True)
        try:
            texts = asyncio.run(upgrade(Path(folder), parts))
        except AssertionError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        finally:
            for part in parts:
                part.end()
    if len(set(texts)) > 1:
        sys.stderr.write(f"{len(set(texts))} different answers to one greedy prompt\n")
        return 1
    sys.stdout.write(f"{len(texts)} answers, the same text each; {time.monotonic() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
