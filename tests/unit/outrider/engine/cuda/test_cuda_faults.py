"""The fake CUDA device catches what would fail on a GPU, wait for it, or read what has not come: faults planted in the
product one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants import Mutant
from tests.mutants.operators import Operator, call
from tests.random_heads import random_medusa
from tests.tiny_models import tiny_llama
from tests.unit.outrider.engine.cuda.cuda_cases import BANS, DRAWN, GREEDY, TREE, Case, check, opened, rounds
from tests.unit.outrider.engine.cuda.cuda_pair import Pair, tiny_pair
from tests.unit.outrider.engine.cuda.fake_cuda import FakeCuda, fake_cuda
from tests.unit.outrider.engine.cuda.planted import planted

DECIDE, PAGED = "target_service:_DeviceStep.read", "outrider.engine.attention.paged_attention"
TO_DEVICE = "outrider.engine.host_copy:to_device"
CHAIN_CASE, TREE_CASE, BANS_CASE = Case("chain", GREEDY), Case("tree", GREEDY, TREE), Case("bans", BANS)
DRAWN_CASE = Case("drawn", DRAWN)


@dataclass(frozen=True)
class Fault:
    why: str
    function: str
    operator: Operator
    error: str
    """What is raised."""
    case: Case = CHAIN_CASE


TWO_DEVICES, WAITS, NOT_WAITED = "at least two devices", r"Wait\(.*Wait\(", "was not waited for"
FAULTS = (
    Fault(
        "indices of rows are left on the host",
        f"{PAGED}:_group",
        call("to_device", to="torch.from_numpy(_0)", nth=(2, 2)),
        TWO_DEVICES,
    ),
    Fault(
        "a mask is left on the host",
        f"{PAGED}:_mask",
        call("to_device", "where", to="torch.from_numpy(_0)"),
        TWO_DEVICES,
        TREE_CASE,
    ),
    Fault(
        "a tensor is made where tensors are made by default",
        "target_service:_DeviceStep.__init__",
        call("zeros", "device", to="_f(_0, dtype=_dtype)"),
        TWO_DEVICES,
        DRAWN_CASE,
    ),
    Fault(
        "a result is read number by number",
        DECIDE,
        call("cpu", to="torch.tensor([number.item() for number in _self])"),
        WAITS,
    ),
    Fault(
        "all logits come to the host",
        DECIDE,
        call("cpu", to="torch.cat([self._logits.flatten().double(), _self]).cpu()[self._logits.numel() :]"),
        "bytes came to the host",
    ),
    Fault(
        "a tensor of the device is taken for an array",
        DECIDE,
        call("cpu", to="_self"),
        "can't convert cuda:0",
    ),
    Fault(
        "a copy to the host is read before it came",
        DECIDE,
        call("cpu", to='_self.to("cpu", non_blocking=True)'),
        f"{NOT_WAITED}|NonFiniteLogits|verify failed|out of range|invalid value",
        DRAWN_CASE,
    ),
    Fault("what goes up is not pinned", TO_DEVICE, call("pin_memory", to="_self"), WAITS),
    Fault("what goes up is waited for", TO_DEVICE, call("to", "pin_memory", to="_f(_0)"), WAITS),
    Fault(
        "an index of the host is copied by the operation that it indexes",
        "target_service:_DeviceStep._up",
        call("to_device", to="torch.from_numpy(_0)"),
        WAITS,
    ),
    Fault(
        "rows are picked by a mask, so that their number must be known",
        DECIDE,
        call("sound_rows", to="_[_]"),
        WAITS,
    ),
    Fault(
        "a number of the host is written to places of the device",
        "outrider.engine.sampling:process_unchecked",
        call("index_put_", to="_self.__setitem__(_0, -torch.inf)"),
        WAITS,
        BANS_CASE,
    ),
    Fault(
        "a draft brings its logits to the host twice",
        "outrider.engine.sampling:HostLogits.__init__",
        call("cpu", to="[_self.cpu(), _self.cpu()][1]"),
        WAITS,
    ),
)


@pytest.fixture(scope="module")
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@pytest.fixture(scope="module")
def pair(device: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    models = tiny_pair(tmp_path_factory.mktemp("models"))
    with pytest.MonkeyPatch.context() as patch:
        yield Pair(patch, *models, device="cuda", attention_path="paged", max_slots=4, context_limit=256)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.why)
def test_a_planted_fault_is_caught(device: FakeCuda, pair: Pair, fault: Fault) -> None:
    with opened(pair, fault.case):
        check(fault.case, rounds(device, pair, fault.case, 1))  # what comes is the fault's doing
    with (
        planted(Mutant(fault.function, fault.operator, fault.why, ())),
        pytest.raises((RuntimeError, RuntimeWarning, TypeError, AssertionError, IndexError), match=fault.error),
        opened(pair, fault.case),
    ):
        check(fault.case, rounds(device, pair, fault.case, 1))


def test_rows_that_a_head_leaves_on_the_host_are_caught(
    device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_llama(tmp_path / "target", sharpness=3.0)
    heads = random_medusa(target, tmp_path / "heads")
    sizes = {"max_slots": 4, "context_limit": 256}
    pair = Pair(monkeypatch, heads, target, device="cuda", of_draft={"target_model": target}, **sizes)
    pair.test_wiring()
    fault = Mutant("outrider.engine.heads:MedusaHeads.forward", call("to_device", to="_0"), "heads crash on a GPU", ())
    with planted(fault), pytest.raises(RuntimeError, match=TWO_DEVICES):
        pair.test_wiring()
