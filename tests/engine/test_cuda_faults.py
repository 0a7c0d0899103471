"""The fake CUDA device catches what would fail on a GPU, wait for it, or read what has not come: faults planted in the
product one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.cuda_cases import BANS, DRAWN, GREEDY, TREE, Case, check, opened, rounds
from tests.engine.cuda_pair import Pair, tiny_pair
from tests.engine.fake_cuda import FakeCuda, fake_cuda
from tests.engine.planted import planted
from tests.mutants import Mutant
from tests.random_heads import random_medusa
from tests.tiny_models import tiny_llama

DECIDE, COPY = "target_service/decide_on_device.py", "outrider/engine/cuda/host_copy.py"
PAGED = "outrider/engine/paths/paged_attention.py"
COMES_DOWN = "torch.cat([part.double() for part in parts]).cpu().numpy()"
GOES_UP = "return tensor.pin_memory().to(device, non_blocking=True)"
CHAIN_CASE, TREE_CASE, BANS_CASE = Case("chain", GREEDY), Case("tree", GREEDY, TREE), Case("bans", BANS)
DRAWN_CASE = Case("drawn", DRAWN)


@dataclass(frozen=True)
class Fault:
    why: str
    file: str
    old: str
    new: str
    says: str
    """What is raised."""
    case: Case = CHAIN_CASE


TWO_DEVICES, WAITS, NOT_WAITED = "at least two devices", r"Wait\(.*Wait\(", "was not waited for"
FAULTS = (
    Fault(
        "indices of rows are left on the host",
        PAGED,
        "to_device(gather.reshape(-1), device)",
        "torch.from_numpy(gather.reshape(-1))",
        TWO_DEVICES,
    ),
    Fault(
        "a mask is left on the host",
        PAGED,
        "to_device(np.where(sees, np.float32(0), np.float32(-np.inf)), device).to(dtype)",
        "torch.from_numpy(np.where(sees, np.float32(0), np.float32(-np.inf))).to(dtype)",
        TWO_DEVICES,
        TREE_CASE,
    ),
    Fault(
        "a tensor is made where tensors are made by default",
        DECIDE,
        "torch.arange(width + 1, device=self._device)",
        "torch.arange(width + 1)",
        TWO_DEVICES,
        DRAWN_CASE,
    ),
    Fault(
        "a result is read number by number",
        DECIDE,
        COMES_DOWN,
        "np.array([number.item() for part in parts for number in part])",
        WAITS,
    ),
    Fault(
        "all logits come to the host",
        DECIDE,
        COMES_DOWN,
        "torch.cat([logits.flatten().double(), *(p.double() for p in parts)]).cpu().numpy()[logits.numel() :]",
        "bytes came to the host",
    ),
    Fault(
        "a tensor of the device is taken for an array",
        DECIDE,
        COMES_DOWN,
        "torch.cat([part.double() for part in parts]).numpy()",
        "can't convert cuda:0",
    ),
    Fault(
        "a copy to the host is read before it came",
        DECIDE,
        COMES_DOWN,
        'torch.cat([part.double() for part in parts]).to("cpu", non_blocking=True).numpy()',
        f"{NOT_WAITED}|NonFiniteLogits|verify failed|nothing to draw|invalid value",
        DRAWN_CASE,
    ),
    Fault("what goes up is not pinned", COPY, GOES_UP, "return tensor.to(device, non_blocking=True)", WAITS),
    Fault("what goes up is waited for", COPY, GOES_UP, "return tensor.pin_memory().to(device)", WAITS),
    Fault(
        "an index of the host is copied by the operation that it indexes",
        DECIDE,
        "to_device(np.argsort(order), self._device)]",
        "torch.from_numpy(np.argsort(order))]",
        WAITS,
    ),
    Fault(
        "rows are picked by a mask, so that their number must be known",
        DECIDE,
        "parts = [sound_rows(logits),",
        "parts = [sound_rows(logits)[sound_rows(logits)],",
        WAITS,
    ),
    Fault(
        "a number of the host is written to places of the device",
        "outrider/engine/sampling/penalties.py",
        "processed.index_put_((cells[0], cells[1]), lowest)",
        "processed[cells[0], cells[1]] = -torch.inf",
        WAITS,
        BANS_CASE,
    ),
    Fault(
        "a draft brings its logits to the host once a slot",
        "draft_service/model_drafter.py",
        "own = host if slot.translation is None",
        "own = HostLogits(fed.logits) if slot.translation is None",
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
        planted(Mutant(fault.file, fault.old, fault.new, fault.why, ())),
        pytest.raises((RuntimeError, RuntimeWarning, TypeError, AssertionError), match=fault.says),
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
    to_its_device = "to_device(hidden, self.device).to(self.dtype)"
    fault = Mutant(
        "outrider/engine/heads/medusa.py", to_its_device, "hidden.to(self.dtype)", "heads crash on a GPU", ()
    )
    with planted(fault), pytest.raises(RuntimeError, match=TWO_DEVICES):
        pair.test_wiring()
