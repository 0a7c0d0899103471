"""Small models, workers of them as processes, and streams to these, shared by the tests of a module.

Processes and one event loop a module: grpc.aio does not stand several loops in one process.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from gateway.admission import admission
from gateway.tokenizer import Tokenizer
from tests.checkers import inline_checker
from tests.service.control_client import ControlClient, eventually, idle
from tests.service.recorder import Recorder, started
from tests.service.reference_model import ReferenceModel
from tests.service.scripted_generator import ScriptedGenerator, demo_tokenizer
from tests.stack import Process
from tests.tiny_models import tiny_llama


@pytest.fixture(autouse=True)
def _checks_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applications that are made here check grammars in this process: two processes for each would take 0.2 s."""
    monkeypatch.setattr(admission, "create_checker", inline_checker)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.fixture
def generator(tokenizer: Tokenizer) -> ScriptedGenerator:
    return ScriptedGenerator(tokenizer, "the quick brown fox")


HOLD, HOLD_S = "target_service.leases.hold.MAX_HOLD_S", 3.0
"""How long the module's target holds a step for the draft tokens that its slot names: longer than usual, since here the
machine is busy with other tests.
"""


@contextlib.contextmanager
def worker(module: str, folder: str, *args: str) -> Iterator[Process]:
    """A worker process on one core, its metrics served; ended with the block."""
    core = str(max(os.sched_getaffinity(0)))
    process = Process(module, ["--model", folder, "--cpu-cores", core, "--metrics-port", "0", *args])
    try:
        yield process
    finally:
        process.stop()


@contextlib.asynccontextmanager
async def stream_to(process: Process, role: str) -> AsyncIterator[ControlClient]:
    """A stream to the worker; what was opened on it is freed when it ends."""
    async with ControlClient(process.address, role) as client:
        yield client
    async with ControlClient(process.address, role) as client:
        await eventually(idle, client)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("target"), sharpness=3.0)


@pytest.fixture(scope="session")
def reference(target_folder: str) -> ReferenceModel:
    return ReferenceModel(target_folder)


@pytest.fixture(scope="module")
def target_worker(target_folder: str) -> Iterator[Process]:
    with worker("target_service", target_folder, "--max-slots", "8", f"@{HOLD}={HOLD_S}") as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def target(target_worker: Process) -> AsyncIterator[ControlClient]:
    """A stream to the module's target; whatever the test opened on it is freed when it ends."""
    async with stream_to(target_worker, "target") as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def recorder() -> AsyncIterator[Recorder]:
    made = Recorder()
    server = await started(made)
    yield made
    await server.stop(None)


@pytest_asyncio.fixture(loop_scope="module")
async def draft(draft_worker: Process) -> AsyncIterator[ControlClient]:
    """A stream to the module's draft, which is the module's own `draft_worker`."""
    async with stream_to(draft_worker, "draft") as client:
        yield client
