"""The launcher and Ray Serve side by side: how soon workers restart, drain, are added and move, and what streams see.

A Ray cluster of three machines, played on this one as in `make cluster-test` (it needs root), two targets and two
drafts of the demo pair on two of them, a gateway, and clients that stream answers all the time. The same
events strike a system of `deploy.launcher` and one of `benchmarks.serve_workers`, in the same order. Every time but the
first is from the event. Lines are counted as `make lines` counts them.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import yaml

from benchmarks.common import Report, parser
from deploy.node_drain import FOLDER
from outrider.client import AsyncClient
from outrider.v1 import common_pb2, draft_pb2_grpc, registry_pb2, target_pb2_grpc
from outrider.wire.processes.processes import become_subreaper, end_descendants
from tests.cluster.nodes import FIRST, HEAD, SECOND, THIRD, Nodes, enter_network
from tests.cluster.run import LABELS, settings
from tests.e2e.process_tree import Command, Tree
from tests.e2e.registry_load import asked_through, members, sizes
from tests.e2e.streams import PROMPT

NUM_CLIENTS = 4
MAX_TOKENS = 400
MAX_S = 150.0
"""Until an event counts as not over."""
PORT = 7000
STUBS: dict[int, Any] = {
    registry_pb2.ROLE_TARGET: target_pb2_grpc.TargetServiceStub,
    registry_pb2.ROLE_DRAFT: draft_pb2_grpc.DraftServiceStub,
}


class System:
    """Workers and registry of one kind, as a process of ours and what it makes Ray start."""

    def __init__(self, kind: str, nodes: Nodes, config: Path) -> None:
        self.kind = kind
        self._nodes = nodes
        self._config = config
        self._command = self._start()
        self.registry = f"{HEAD}:{PORT}"

    def _start(self) -> Command:
        if self.kind == "launcher":
            return Command("-m", "deploy.launcher", "--config", str(self._config), "--registry", f"{HEAD}:{PORT}")
        return Command(
            "-m",
            "benchmarks.serve_workers",
            *("--config", str(self._config), "--address", self._nodes.address, "--registry", f"{HEAD}:{PORT}"),
            stdin=" ",
        )

    def ready(self) -> None:
        self._command.ready()

    def kill_manager(self, tree: Tree) -> None:
        """The process that decides: the launcher, which `outrider up` would start again, or Serve's controller."""
        if self.kind == "serve":
            os.kill(tree.pids_of("ServeController")[0], signal.SIGKILL)
            return
        self._command.signal(signal.SIGKILL)
        self._command.wait()
        self._command.end()
        time.sleep(0.5)
        self._command = self._start()

    def end(self) -> None:
        if self.kind == "launcher":
            self._command.process.terminate()
        elif self._command.process.stdin is not None:
            self._command.process.stdin.close()
        self._command.wait(120)

    def log(self) -> str:
        return self._command.log()

    def close(self) -> None:
        self._command.end()


@dataclass
class Streams:
    """Clients that stream, one answer after the other each.

    No two prompts begin alike: a gateway would rather go where a beginning is cached than to a target that is new.
    """

    num_tokens: list[int] = field(default_factory=list)
    """Of each answer."""
    num_asked: int = 0
    lost: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """Between two rounds of an answer, and before the first."""
    is_over: bool = False

    async def ask(self, client: AsyncClient) -> None:
        while not self.is_over:
            num_tokens, at_s = 0, time.monotonic()
            self.num_asked += 1
            prompt = f"# {self.num_asked}\n{PROMPT}"
            try:
                stream = client.stream(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
                async for each in stream:
                    num_tokens += len(each.tokens)
                    now_s = time.monotonic()
                    self.pauses_s.append(now_s - at_s)
                    at_s = now_s
            except Exception as error:
                self.lost.append(repr(error))
                await asyncio.sleep(0.2)
                continue
            self.num_tokens.append(num_tokens)


async def info_of(member: registry_pb2.Member) -> common_pb2.WorkerInfo | None:
    """None where nobody answers."""
    async with grpc.aio.insecure_channel(member.address) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            found: common_pb2.WorkerInfo = await STUBS[member.role](channel).GetInfo(
                common_pb2.GetInfoRequest(), timeout=2
            )
            return found
    return None


async def serving(registry: str, pool: str) -> list[tuple[registry_pb2.Member, common_pb2.WorkerInfo]]:
    try:
        found = [one for one in await members(registry) if one.pool == pool]
    except (grpc.aio.AioRpcError, TimeoutError, AttributeError):  # it is away
        return []
    there = [one for one in found if one.state == registry_pb2.MEMBER_STATE_SERVING]
    infos = await asyncio.gather(*map(info_of, there))
    return [(one, info) for one, info in zip(there, infos, strict=True) if info is not None]


async def until(holds: Callable[[], Awaitable[bool]], since_s: float) -> float:
    """Seconds from `since_s` until it holds. Raises TimeoutError."""
    while not await holds():
        if time.monotonic() - since_s > MAX_S:
            raise TimeoutError(f"not within {MAX_S:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - since_s


async def worked(registry: str, pool: str, count: int, known: set[int]) -> bool:
    """`count` workers serve, and those with an epoch that is not `known` have made steps."""
    found = await serving(registry, pool)
    fresh = [info for _, info in found if info.epoch not in known]
    return len(found) == count and bool(fresh) and all(info.num_steps for info in fresh)


@dataclass
class Event:
    """One row of the table."""

    name: str
    seconds: float
    lost: int
    answers: int
    longest_pause_s: float


class Trial:
    """Strikes one system."""

    def __init__(self, system: System, nodes: Nodes, folder: Path, tree: Tree, events: list[Event]) -> None:
        self._system = system
        self._nodes = nodes
        self._folder = folder
        self._tree = tree
        self._streams = Streams()
        self.registry = system.registry
        self.events = events

    async def run(self, names: list[str], streams: Streams) -> None:
        """names: of the events, or parts of names; none for all."""
        self._streams = streams
        everything: dict[str, Callable[[], Awaitable[float]]] = {
            "kill -9 of a target, until another has worked": lambda: self._struck("chat", signal.SIGKILL),
            "kill -9 of a draft, until another has worked": lambda: self._struck("small", signal.SIGKILL),
            "SIGSTOP of a target, until another has worked": lambda: self._struck("chat", signal.SIGSTOP),
            "a third target asked for, until it has worked": lambda: self._scaled("chat", 3),
            "three targets to two, until one has drained and ended": lambda: self._scaled("chat", 2),
            "a third draft asked for, until it has worked": lambda: self._scaled("small", 3),
            "three drafts to two, until one has drained and ended": lambda: self._scaled("small", 2),
            "kill -9 of launcher or controller and of a draft, until another has worked": self._unmanaged,
            "a machine is told that it will end and ends, until all four serve elsewhere": self._drain_machine,
            "the next falls silent, until all four serve elsewhere": self._lose_machine,
        }
        for name, strike in everything.items():
            if names and not any(each in name for each in names):
                continue
            before = (len(self._streams.lost), len(self._streams.num_tokens), len(self._streams.pauses_s))
            try:
                seconds = await strike()
            except TimeoutError:
                seconds = float("nan")
            await self._next_answers()
            lost, answers, pauses = before
            event = Event(
                name,
                seconds,
                len(self._streams.lost) - lost,
                len(self._streams.num_tokens) - answers,
                max(self._streams.pauses_s[pauses:], default=0.0),
            )
            print(self._system.kind, event, self._streams.lost[lost:], flush=True)
            self.events.append(event)

    async def _next_answers(self) -> None:
        """Until every client that was reading has had its answer, and another one."""
        began_s, before = time.monotonic(), len(self._streams.num_tokens)

        async def holds() -> bool:
            return len(self._streams.num_tokens) >= before + 2 * NUM_CLIENTS

        with contextlib.suppress(TimeoutError):
            await until(holds, began_s)

    async def _epochs(self, pool: str) -> set[int]:
        return {info.epoch for _, info in await serving(self.registry, pool)}

    async def _struck(self, pool: str, number: signal.Signals) -> float:
        found = await serving(self.registry, pool)
        known = {info.epoch for _, info in found}
        victim = max(found, key=lambda one: one[1].num_slots_in_use)[1].pid
        began_s = time.monotonic()
        os.kill(victim, number)
        return await until(lambda: worked(self.registry, pool, len(known), known), began_s)

    async def _scaled(self, pool: str, count: int) -> float:
        found = await serving(self.registry, pool)
        known, before = {info.epoch for _, info in found}, {info.pid for _, info in found}
        began_s = time.monotonic()
        await asyncio.to_thread(sizes, self.registry, pool, count)
        if count > len(found):
            return await until(lambda: worked(self.registry, pool, count, known), began_s)

        async def ended() -> bool:
            return sum(is_there(pid) for pid in before) == count

        return await until(ended, began_s)

    async def _unmanaged(self) -> float:
        known = await self._epochs("small")
        victim = (await serving(self.registry, "small"))[0][1].pid
        began_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(self._system.kill_manager, self._tree)
        return await until(lambda: worked(self.registry, "small", 2, known), began_s)

    async def _elsewhere(self, node: str, began_s: float) -> float:
        async def holds() -> bool:
            found = [one for pool in ("chat", "small") for one in await serving(self.registry, pool)]
            targets = [info for one, info in found if one.role == registry_pb2.ROLE_TARGET]
            return len(found) == 4 and all(one.node != node for one, _ in found) and all(i.num_steps for i in targets)

        return await until(holds, began_s)

    async def _lose_machine(self) -> float:
        began_s = time.monotonic()
        self._nodes.lose(SECOND)
        return await self._elsewhere(SECOND, began_s)

    async def _drain_machine(self) -> float:
        """As a pod's end begins, with room elsewhere. Serve hears of it from Ray, with the launcher the workers do."""
        start_machine(self._nodes, self._folder, THIRD)
        began_s = time.monotonic()
        if self._system.kind == "serve":
            await asyncio.to_thread(tell_ray, self._nodes, FIRST)
            seconds = await self._elsewhere(FIRST, began_s)
            self._nodes.lose(FIRST)
            return seconds
        env = {**self._nodes.env, FOLDER: str(self._folder / f"drain-{FIRST}")}
        await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "deploy.node_drain"], env=env, check=True)
        self._nodes.lose(FIRST)
        return await self._elsewhere(FIRST, began_s)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def tell_ray(nodes: Nodes, address: str) -> None:
    """`ray drain-node`, with a minute's notice."""
    code = (
        "import ray, subprocess, sys\n"
        f"ray.init(address={nodes.address!r}, _node_ip_address={HEAD!r})\n"
        f"print([one['NodeID'] for one in ray.nodes() if one['NodeManagerAddress'] == {address!r} and one['Alive']][0])"
    )
    found = subprocess.run([sys.executable, "-c", code], env=nodes.env, capture_output=True, text=True, check=True)
    command = [
        *(str(Path(sys.executable).parent / "ray"), "drain-node", f"--address={nodes.address}"),
        *(f"--node-id={found.stdout.split()[-1]}", "--deadline-remaining-seconds=60"),
        *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=it ends"),
    ]
    subprocess.run(command, env=nodes.env, check=True, capture_output=True)


def start_machine(nodes: Nodes, folder: Path, address: str) -> None:
    nodes.env[FOLDER] = str(folder / f"drain-{address}")
    nodes.start(address, LABELS if address != HEAD else "outrider/node=head", 3 if address != HEAD else 0)


@contextlib.asynccontextmanager
async def streaming(registry: str) -> AsyncIterator[Streams]:
    streams = Streams()

    async def has_begun() -> bool:
        return len(streams.num_tokens) >= 2 * NUM_CLIENTS

    async with asked_through(registry, streams, NUM_CLIENTS):
        await until(has_begun, time.monotonic())
        yield streams


def measure(kind: str, folder: Path, only: list[str], events: list[Event]) -> Streams:
    """Add what happened to `events` as it comes."""
    folder.mkdir()
    with Nodes(folder) as nodes:
        nodes.env["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] = "1"  # else one that hangs is asked to drain first
        for address in (HEAD, FIRST, SECOND):
            start_machine(nodes, folder, address)
        config = folder / "cluster.yaml"
        values = settings(nodes)
        values["ray"]["name"] = "trial"
        config.write_text(yaml.safe_dump(values))
        os.environ.update({name: nodes.env[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")})
        tree = Tree()
        began_s = time.monotonic()
        system = System(kind, nodes, config)
        try:
            system.ready()
            start_s = time.monotonic() - began_s
            print(f"{kind}: all serve after {start_s:.1f} s", flush=True)
            events.append(Event("start, on a cluster that runs, until all four serve", start_s, 0, 0, 0.0))
            streams = asyncio.run(strike(Trial(system, nodes, folder, tree, events), only))
            began_s = time.monotonic()
            system.end()
            events.append(Event("the system is told to end, until it has", time.monotonic() - began_s, 0, 0, 0.0))
            return streams
        except BaseException:
            print(system.log(), flush=True)
            for log in sorted(folder.glob("1/session_latest/logs/serve/*.log")):
                print(log.name, log.read_text()[-1500:], flush=True)
            raise
        finally:
            system.close()


async def strike(trial: Trial, only: list[str]) -> Streams:
    async with streaming(trial.registry) as streams:
        await trial.run(only, streams)
    return streams


GOES: dict[str, tuple[str, ...]] = {
    "actors": ("Refused", "WorkerActor", "_was_restarted"),
    "cluster": (),
    "fleet": ("Workers", "Eyes", "Fleet", "_pool_message"),
    "launcher": ("Launcher._serve", "Launcher._start", "Launcher._tick", "Launcher._end", "Launcher._scale"),
    "member": ("Replica", "PoolMember"),
    "node_drain": ("listen", "_accept", "_answer", "drain_workers", "_connect", "main"),
    "placement": (),
    "ray_workers": ("Lost", "RayWorker", "_lost", "RayWorkers", "_spec_of"),
    "registry": (),
    "sightings": ("Sightings", "_refusal"),
    "sizes": (),
}
"""By file of deploy: the definitions that Serve would do for us. All else stays, be it for one definition."""


def lines_of(module: str) -> tuple[int, int]:
    """Lines of the file in all, and of the definitions that go."""
    text = Path("deploy", f"{module}.py").read_text(encoding="utf-8")
    spans: dict[str, int] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            spans[node.name] = _span(node)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            spans |= {f"{node.name}.{each.name}": _span(each) for each in methods}
    return text.count("\n"), sum(spans[name] for name in GOES[module])


def _span(node: ast.ClassDef | ast.FunctionDef) -> int:
    first = min((each.lineno for each in node.decorator_list), default=node.lineno)
    return int(node.end_lineno or first) - first + 1


def tell_lines(report: Report) -> None:
    found = {module: lines_of(module) for module in GOES}
    new = Path("benchmarks", "serve_workers.py").read_text(encoding="utf-8").count("\n")
    rows = [[f"deploy/{name}.py", str(total), str(goes), str(total - goes)] for name, (total, goes) in found.items()]
    total, goes = (sum(each[index] for each in found.values()) for index in (0, 1))
    rows += [
        ["benchmarks/serve_workers.py", "0", "0", str(new)],
        ["all", str(total), str(goes), str(total - goes + new)],
    ]
    report.table("Lines of ours", ["file", "launcher", "goes with Serve", "left with Serve"], rows)
    report.data["lines"] = found | {"new": new}


def tell_events(report: Report, found: dict[str, list[list[Event]]]) -> None:
    names = list(dict.fromkeys(event.name for runs in found.values() for run in runs for event in run))
    rows = []
    for name in names:
        row = [name]
        for runs in found.values():
            events = [event for run in runs for event in run if event.name == name]
            times = ", ".join(
                f"over {MAX_S:g}" if math.isnan(each.seconds) else f"{each.seconds:.1f}" for each in events
            )
            row += [times, str(sum(each.lost for each in events)), _pause(events)]
        rows.append(row)
    columns = ["event"]
    for kind in found:
        columns += [f"{kind}: s, by run", "streams lost", "longest pause, s"]
    report.table("Events", columns, rows)
    report.data["events"] = {kind: [[vars(event) for event in run] for run in runs] for kind, runs in found.items()}


def _pause(events: list[Event]) -> str:
    return f"{max(each.longest_pause_s for each in events):.1f}" if any(each.answers for each in events) else ""


def main() -> int:
    made = parser(__doc__, systems=["launcher", "serve"], repetitions=2)
    made.add_argument("--only", nargs="*", default=[], help="events whose name holds one of these")
    arguments = made.parse_args()
    enter_network()
    become_subreaper()
    folder = Path(tempfile.mkdtemp(prefix="os-"))
    report = Report("serve-launcher", "The launcher and Ray Serve")
    found: dict[str, list[list[Event]]] = {kind: [] for kind in arguments.systems}
    short = dict.fromkeys(arguments.systems, 0)
    loads = [os.getloadavg()[0]]
    try:
        for index in range(arguments.repetitions):
            for kind in arguments.systems:
                events: list[Event] = []
                found[kind].append(events)
                streams = measure(kind, folder / f"{kind[0]}{index}", arguments.only, events)
                short[kind] += sum(number != MAX_TOKENS for number in streams.num_tokens)
                loads.append(os.getloadavg()[0])
    except KeyboardInterrupt:
        report.text("Interrupted: what is missing did not run.")
    finally:
        end_descendants(2.0)
        shutil.rmtree(folder, ignore_errors=True)
    report.text(
        f"Two targets and two drafts of the demo pair on a Ray cluster of three played machines, {NUM_CLIENTS} clients "
        f"that stream {MAX_TOKENS} greedy tokens each, again and again; runs in turn. Seconds are from the event. "
        f"The machine's load average was {min(loads):.0f} to {max(loads):.0f} between the runs."
    )
    tell_events(report, found)
    tell_lines(report)
    lost = {kind: sum(event.lost for run in runs for event in run) for kind, runs in found.items()}
    report.verdict(
        [f"{kind}: {number} streams lost" for kind, number in lost.items() if number]
        + [f"{kind}: {number} answers that ended early" for kind, number in short.items() if number]
        + [
            f"{kind}: {e.name}: not within {MAX_S:g} s"
            for kind, runs in found.items()
            for run in runs
            for e in run
            if math.isnan(e.seconds)
        ]
    )
    report.write(arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
