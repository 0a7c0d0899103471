"""What is fuzzed: real servers. Workers of a tiny model as processes; gateway's doors and registry on a thread each."""

import asyncio
import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from prometheus_client import CollectorRegistry

from deploy.registry import Registry
from gateway.admission.admission import Admission
from gateway.api.app import create_app
from gateway.api.grpc_api import GenerationServicer
from gateway.api.http_server import BACKLOG, HttpServer, bind
from gateway.grammar_checker import create_checker
from gateway.output_format import OutputFormat
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import registry_pb2 as rpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.protocol import PROTOCOL
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, write_keys
from outrider.wire.transport.serving import ServerThread
from tests.checkers import inline_checker
from tests.fuzz.calls import DEADLINE_S, dial, talk
from tests.fuzz.hints import SENTINEL
from tests.service.scripted_generator import ScriptedGenerator, config, demo_tokenizer
from tests.service.test_http_tools import tokenizer_of
from tests.service.test_registry import Scaled
from tests.stack import Process
from tests.tiny_models import tiny_llama
from tests.waiting import wait_until, wait_until_none

SETTLE_S = 30.0
WORKER = ("--max-slots", "16", "--kv-cache-tokens", "8192")


class Worker:
    """A target or draft, and the valid request that it must always answer."""

    def __init__(self, role: str, process: Process, target: "Worker | None" = None) -> None:
        self.role = role
        self.process = process
        self.channel = dial(process.address)
        self._service = f"/outrider.v1.{role.title()}Service"
        self._target = target
        self.epoch = self.info().epoch

    @property
    def address(self) -> str:
        return self.process.address

    def method(self, name: str) -> str:
        return f"{self._service}/{name}"

    def info(self) -> pb.WorkerInfo:
        raw = self.channel.unary_unary(self.method("GetInfo"))(b"", timeout=SETTLE_S)  # type: ignore[call-arg]
        return pb.WorkerInfo.FromString(raw)

    def valid(self) -> bytes:
        """A batch that opens a slot and asks it for a token (target) or a tree (draft), and then for an answer."""
        params = pb.SamplingParams(max_tokens=9, ignore_eos=True)
        slot = pb.OpenSlot(slot=SENTINEL, committed_ids=[5, 6, 7], num_prompt_tokens=3, params=params)
        slot.protocol, slot.speculation.max_draft_tokens = PROTOCOL, 4
        if self.role == "target":
            ask = tpb.Verify(slot=SENTINEL, base_len=3, lease_end_len=4, tickets=[tpb.DraftTicket(ticket=2**60)])
            items = [tpb.TargetRequest(id=SENTINEL - 1, open=slot), tpb.TargetRequest(id=SENTINEL, verify=ask)]
        else:
            assert self._target is not None
            slot.target_address, slot.target_epoch = self._target.address, self._target.epoch
            advance = dpb.Advance(slot=SENTINEL, base_len=3, ticket=2**60)
            items = [dpb.DraftRequest(id=SENTINEL - 1, open=slot), dpb.DraftRequest(advance=advance)]
            slot.slot += 1
            items.append(dpb.DraftRequest(id=SENTINEL, open=slot))
        for item in items:
            item.epoch = self.epoch
        kind = tpb.TargetRequestBatch if self.role == "target" else dpb.DraftRequestBatch
        return kind(items=items).SerializeToString()

    def replies(self, raw: bytes) -> list[Any]:
        kind = tpb.TargetReplyBatch if self.role == "target" else dpb.DraftReplyBatch
        return list(kind.FromString(raw).items)

    def answered(self, raw: bytes) -> bool:
        """Whether this message has the answer to the valid request."""
        return any(reply.id == SENTINEL for reply in self.replies(raw))

    def check_alive(self) -> None:
        """A stream of its own is served, and a step made for it."""
        num_steps = self.info().num_steps

        def has_stepped(raw: bytes) -> bool:
            if self.answered(raw):
                wait_until(lambda: self.info().num_steps != num_steps, "no step was made", SETTLE_S)
                return True
            return False

        status, details, arrived = talk(self.channel, self.method("Control"), [self.valid()], has_stepped)
        good = {reply.WhichOneof("item") for raw in arrived for reply in self.replies(raw)}
        wanted = {"open", "verdict"} if self.role == "target" else {"open"}
        assert status is grpc.StatusCode.OK and good == wanted, (status, details, good)

    def check_empty(self) -> None:
        """No slot, block or lease is held once the streams have ended."""

        def left() -> pb.WorkerInfo | None:
            info = self.info()
            return info if info.num_slots_in_use or info.num_kv_blocks_in_use or info.num_leases else None

        wait_until_none(left, SETTLE_S)


@contextlib.contextmanager
def workers(folder: Path) -> Iterator[tuple[Worker, Worker]]:
    """(target, draft)"""
    target = tiny_llama(folder / "target", sharpness=3.0)
    draft = tiny_llama(folder / "draft", seed=1, sharpness=3.0)
    with contextlib.ExitStack() as stack:
        found: list[Worker] = []
        for role, model, args in (
            ("target", target, ("@target_service.leases.hold.MAX_HOLD_S=0.0",)),
            ("draft", draft, ()),
        ):
            log = folder / f"{role}.log"
            process = Process(f"{role}_service", ["--model", model, *WORKER, *args], stderr_path=log)
            stack.callback(process.stop)
            found.append(Worker(role, process, found[0] if found else None))
            stack.callback(found[-1].channel.close)
        yield found[0], found[1]


@contextlib.contextmanager
def grammar_checks() -> Iterator[Callable[[OutputFormat], str]]:
    """The gateway's way to check a grammar, with its processes."""
    with asyncio.Runner() as runner:
        checker = create_checker(config().max_compile_s)
        try:
            yield lambda output: runner.run(checker.output(b"", output))
        finally:
            runner.run(checker.close())


class FrontDoor:
    """The gateway's gRPC server before a generator that plays a text back."""

    def __init__(self, server: ServerThread) -> None:
        self.generator = ScriptedGenerator(demo_tokenizer(), "the quick brown fox")
        self.admission = Admission(self.generator, config(), CollectorRegistry())
        self.admission.checker = inline_checker()
        address = server.start(GenerationServicer(self.admission).add_to, "127.0.0.1", 0, 1 << 22)
        self.channel = dial(address)

    def check_empty(self) -> None:
        """The server lets go a moment after its client has been told."""
        wait_until_none(lambda: self.generator.num_open or self.admission.bodies.num_bytes, SETTLE_S)


@contextlib.contextmanager
def front_door() -> Iterator[FrontDoor]:
    server = ServerThread()
    front = FrontDoor(server)
    try:
        yield front
    finally:
        front.channel.close()
        server.stop(0.5)


class HttpDoor:
    """The gateway's HTTP server, which asks for an API key, before a generator that plays a text back."""

    def __init__(self, folder: Path) -> None:
        key = new_key()
        write_keys(folder / "keys.yaml", (ApiKey(name="me", sha256=digest_of(key), max_concurrent=64),))
        self.generator = ScriptedGenerator(demo_tokenizer(), model_ids=("target",))  # as in the recorded requests
        self.admission = Admission(self.generator, config(api_keys=str(folder / "keys.yaml")), CollectorRegistry())
        self.admission.checker = inline_checker()
        app = create_app(self.admission)
        self.document = app.openapi()
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._server = HttpServer(app, 75.0)
        (listener,) = bind("127.0.0.1", 0)
        listener.listen(BACKLOG)
        self._connection = http.client.HTTPConnection(*listener.getsockname(), timeout=DEADLINE_S)
        self._loop = uvloop.new_event_loop()  # the gateway's own kind
        serve = self._server.serve(sockets=[listener])
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve,), daemon=True)
        self._thread.start()

    def play(self, template: str, text: str) -> None:
        """Answer with this text from now on, to a model with this chat template."""
        self.generator.own_tokenizer, self.generator.text = tokenizer_of(template), text

    def post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Return (status, content type, body). Raises TimeoutError."""
        try:
            return self._post(path, body)
        except (BrokenPipeError, ConnectionResetError):  # it was idle for long
            self._connection.close()
            return self._post(path, body)

    def _post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        self._connection.request("POST", path, body, self._headers)
        answer = self._connection.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read()

    def check_empty(self) -> None:
        """No answer, byte or task of a request is left, and the key has none of its answers running."""
        wait_until_none(self._held, SETTLE_S)

    def _held(self) -> dict[str, Any]:
        bodies, caller = self.admission.bodies, self.admission.access.caller(self._headers["authorization"])
        counts = {
            "answers": self.generator.num_open,
            "answers of the key": caller.num_choices,
            "bytes": bodies.num_bytes,
            "bytes of the key": bodies.num_bytes_of.total(),
            "tasks": len(asyncio.all_tasks(self._loop)) - 1,  # the server's own
        }
        return {what: count for what, count in counts.items() if count}

    def stop(self) -> None:
        self._connection.close()
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(SETTLE_S)
        self._loop.close()


@contextlib.contextmanager
def http_door(folder: Path) -> Iterator[HttpDoor]:
    door = HttpDoor(folder)
    try:
        yield door
    finally:
        door.stop()


@contextlib.contextmanager
def registry() -> Iterator[tuple[Registry, grpc.Channel]]:
    """With one member to tell of."""
    served = Registry(Scaled())
    address = served.start("127.0.0.1:0", None)
    worker = rpb.Worker(name="a", pool="p", address="127.0.0.1:1")
    served.send_membership(rpb.WorkerList(epoch=1, version=1, workers=[worker]))
    channel = dial(address)
    try:
        yield served, channel
    finally:
        channel.close()
        served.stop()
