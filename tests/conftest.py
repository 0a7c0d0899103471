"""Fixtures shared by all tests."""

import gc
import json
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before gRPC is imported: a child that is started while it runs would end in its fork handlers (grpc/grpc #43055).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from tests.stack import Stack, running

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one takes more than 200 ms for any example
hypothesis.settings.load_profile("any machine")
hypothesis.settings.register_profile(
    "first failure", deadline=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs inherit it, and so would children
    signal.signal(signal.SIGINT, signal.default_int_handler)

STARTS_RAY = ("test_ray", "test_up.py")
"""How the names of files begin whose tests start a Ray. Two that start side by side on two cores may take longer than
Ray waits for itself.
"""


def starts_ray(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.endswith("e2e") and name.startswith(STARTS_RAY)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where processes share the tests, files stay whole, and those that start a Ray follow one another."""
    from xdist.scheduler import LoadFileScheduling

    class OneRayAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "ray" if starts_ray(file) else file

    return OneRayAtATime(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end. Looking for garbage in it takes as long as making it: 7 s of
    each process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without a collection of garbage, which in the tests' process looks at far more than in a gateway."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait most begin, beside the law, which computes all the time; the rest in their order."""
    items.sort(key=lambda item: 0 if starts_ray(str(item.path)) else 1 if item.path.parent.name == "law" else 2)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo pair served by three real processes, shared by the tests of a session."""
    patient = (
        "@target_service.leases.hold.MAX_HOLD_S=3",
    )  # else a machine that is busy for a second makes a plain step
    with running(target_args=patient, log_folder=tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small lose by more, and other processes of the suite lose most: idle threads of torch spin."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def every_day(pytestconfig: pytest.Config) -> bool:
    """The slow tests are left out."""
    return bool(pytestconfig.getoption("markexpr") == "not slow")


@pytest.fixture(scope="session")
def dev_prompts() -> list[str]:
    """Held-out text; the first 24 are used for parity."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
