"""`make cluster-test`: a Ray cluster of three machines, two drafts and two targets on them, and clients that ask all
the time while a draft is added and drained, and while a machine loses its power and another one joins.

Prints a line for each check. Exit code 1 when one fails, 3 when this machine gives no network namespaces.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from outrider.v1 import registry_pb2
from outrider.wire.processes.descendants import become_subreaper, end_descendants
from tests.cluster.nodes import FIRST, HEAD, SECOND, THIRD, Nodes, NoNetwork, enter_network
from tests.e2e.process_tree import Command
from tests.e2e.registry_load import Load, members, sizes, under_load, until_serving
from tests.stack import DEMO_DRAFT, DEMO_TARGET, KV_CACHE_TOKENS

LABELS = "outrider/node=worker"
NUM_CLIENTS = 4
SLOW_S = 240.0
"""How long anything may take before it counts as failed; the times themselves are printed."""
JOIN = "import ray; ray.init(address={address!r}, _node_ip_address={head!r}); print('joined')"
JOIN_S = 60.0
REFUSED = "InvalidAuthToken"
"""In what Ray says to who has no token or a wrong one."""


class Failed(Exception):
    """A check that does not hold."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def check(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)
    say(f"ok    {text}")


def settings(nodes: Nodes) -> dict[str, Any]:
    """A target and up to two drafts fit on a machine, so that the target of one that is lost waits for another."""
    worker = {"kv_cache_tokens": int(KV_CACHE_TOKENS), "labels": {"outrider/node": "worker"}}
    return {
        "targets": {
            "chat": {
                "model": DEMO_TARGET,
                "model_name": "demo",
                "count": 2,
                "num_cpus": 0.9,
                "batch_invariant": True,
                **worker,
            }
        },
        "drafts": {"small": {"model": DEMO_DRAFT, "serves": ["chat"], "count": 2, "num_cpus": 0.45, **worker}},
        "ray": {"address": nodes.address},
    }


async def found(registry: str) -> dict[str, registry_pb2.Worker]:
    return {member.name: member for member in await members(registry)}


async def until(holds: Callable[[dict[str, registry_pb2.Worker]], bool], registry: str, load: Load, what: str) -> float:
    """Seconds until the membership is so."""
    began = time.monotonic()
    while not holds(await found(registry)):
        if load.errors:
            raise Failed(f"a request failed: {load.errors[0]!r}")
        if time.monotonic() - began > SLOW_S:
            raise Failed(f"{what}: not after {SLOW_S:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def next_answers(load: Load) -> float:
    """Seconds until every client has had an answer that it had asked for before now, and another one."""
    began, before = time.monotonic(), len(load.texts)
    while len(load.texts) < before + 2 * NUM_CLIENTS:
        if load.errors or time.monotonic() - began > SLOW_S:
            raise Failed(f"no more answers: {load.errors}")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def add_and_drain_a_draft(registry: str, load: Load) -> None:
    began = time.monotonic()
    sizes(registry, "small", 3)
    await until_serving(registry, "small", 3, SLOW_S)
    check(not load.errors, f"a third draft serves after {time.monotonic() - began:.1f} s, no request failed")
    began = time.monotonic()
    sizes(registry, "small", 2)
    await until_serving(registry, "small", 2, SLOW_S)
    await next_answers(load)
    check(not load.errors, f"one draft was drained and ended after {time.monotonic() - began:.1f} s, no request failed")


async def lose_a_machine(nodes: Nodes, registry: str, load: Load) -> None:
    before = await found(registry)
    on_it = [name for name, member in before.items() if member.node == FIRST]
    check(any(name.startswith("target") for name in on_it), f"{' and '.join(on_it)} run on {FIRST}, which is lost now")
    nodes.lose(FIRST)
    lost_s = await until(lambda now: not any(now[name].node == FIRST for name in on_it), registry, load, "members told")
    say(f"      gateways were told after {lost_s:.1f} s")
    answers_s = await next_answers(load)
    check(
        not load.errors, f"requests go on without it: {2 * NUM_CLIENTS} more answers in {answers_s:.1f} s, none failed"
    )
    nodes.start(THIRD, LABELS, 2)
    serving = registry_pb2.WORKER_STATE_SERVING
    back_s = await until(lambda now: all(one.state == serving for one in now.values()), registry, load, "all back")
    after = await found(registry)
    check(
        any(member.node == THIRD for member in after.values()) and set(after) == set(before),
        f"what ran there serves again {back_s:.1f} s after {THIRD} joined: "
        + ", ".join(f"{name} on {member.node}" for name, member in after.items()),
    )


async def under_clients(nodes: Nodes, registry: str) -> None:
    async with under_load(registry, NUM_CLIENTS) as load:
        await add_and_drain_a_draft(registry, load)
        await lose_a_machine(nodes, registry, load)
    load.assert_whole()
    check(True, f"{len(load.texts)} answers, all the same, {load.num_drafted} tokens of them drafted; none was lost")


def joining(nodes: Nodes, **changed: str) -> str:
    """What a driver prints that would join; `changed`: variables of its."""
    code, env = JOIN.format(address=nodes.address, head=HEAD), {**nodes.env, **changed}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=JOIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing in {JOIN_S:g} s"
    return ended.stdout + ended.stderr


def check_token(nodes: Nodes) -> None:
    said = joining(nodes)
    if "joined" not in said.splitlines():
        raise Failed(f"who has the token does not join:\n{said}")
    for changed in ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": ""}, {"RAY_AUTH_TOKEN": "wrong"}):
        said = joining(nodes, **changed)
        if REFUSED not in said or "joined" in said.splitlines():
            raise Failed(f"not refused with {changed}:\n{said}")
    check(True, "three machines; a driver joins them with their token, and Ray refuses it without and with a wrong one")


def run(folder: Path) -> None:
    with Nodes(folder) as nodes:
        for address, num_cpus in ((HEAD, 0), (FIRST, 2), (SECOND, 2)):
            nodes.start(address, LABELS if num_cpus else "outrider/node=head", num_cpus)
        check_token(nodes)
        config = folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(settings(nodes)))
        os.environ.update({name: nodes.env[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")})
        launcher = Command("-m", "deploy.launcher", "--config", str(config), "--registry", f"{HEAD}:0")
        try:
            ready = launcher.ready()
            where = {member["name"]: member["node"] for member in ready["members"]}
            check(
                {where["target-chat-0"], where["target-chat-1"]} == {FIRST, SECOND},
                ", ".join(f"{name} on {node}" for name, node in where.items()),
            )
            asyncio.run(under_clients(nodes, ready["registry"]))
            launcher.process.terminate()
            check(launcher.wait(60) == 0, "the launcher ended its workers and left the cluster")
        except BaseException:
            say(launcher.log())
            raise
        finally:
            launcher.end()


def main() -> int:
    try:
        enter_network()
    except NoNetwork as error:
        say(f"this needs network namespaces, as root has them, and `unshare` and `ip`: {error}")
        return 3
    become_subreaper()
    folder = Path(tempfile.mkdtemp(prefix="oc-"))
    try:
        run(folder)
    except Failed as error:
        say(f"FAIL  {error}")
        return 1
    finally:
        end_descendants(2.0)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
