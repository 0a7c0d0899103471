"""What the fake CUDA device refuses, counts and holds back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.outrider.engine.cuda.fake_cuda import DEVICE, FakeCuda, fake_cuda


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


@pytest.fixture
def tensor(device: FakeCuda) -> Tensor:
    """[3, 4] float32."""
    made = torch.arange(12, dtype=torch.float32, device=DEVICE).view(3, 4)
    device.take()
    return made


def pinned(size: int) -> Tensor:
    return torch.zeros(size).pin_memory()


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ torch.ones(4, 2),
    "a sum": lambda x: x + torch.ones(4),
    "a lookup": lambda x: nn.functional.embedding(torch.tensor([0]), x),
    "an index of rows": lambda x: x.index_select(0, torch.tensor([0])),
    "rows side by side": lambda x: torch.cat([x, torch.ones(1, 4)]),
    "a mask": lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool), 0.0),
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("inference", [False, True])
def test_tensors_of_two_devices_are_refused(
    tensor: Tensor, operation: Callable[[Tensor], Any], inference: bool
) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="at least two devices"):
        operation(tensor)


def test_a_tensor_of_the_device_is_no_array(tensor: Tensor) -> None:
    for operation in (tensor.numpy, lambda: np.asarray(tensor)):
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            operation()


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: x.tolist(),
    "a number": lambda x: float(x[0, 0]),
    "a decision": lambda x: bool((x > 1).any()),
    "a copy to the host": lambda x: x.cpu(),
    "a copy into a tensor of the host": lambda x: torch.empty(3, 4).copy_(x),
    "rows by a mask": lambda x: x[x > 1],
    "places": lambda x: x.nonzero(),
    "rows by a list": lambda x: x[[0, 2]],
    "rows by places on the host": lambda x: x[torch.tensor([0, 2])],
    "a tensor of a list": lambda x: torch.tensor([1, 2], device=x.device),
    "a copy to the device": lambda x: torch.ones(3).to(x.device),
    "one that is not pinned": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a number written to places": lambda x: x.__setitem__((torch.arange(2, device=x.device),), 1.0),
    "a stream": lambda x: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("operation", WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("inference", [False, True])
def test_a_wait_is_counted_once(
    device: FakeCuda, tensor: Tensor, operation: Callable[[Tensor], Any], inference: bool
) -> None:
    with torch.inference_mode(inference):
        operation(tensor)
    assert len(device.take().waits) == 1


FREE: dict[str, Callable[[Tensor], Any]] = {
    "a product": lambda x: x @ x.T,
    "a number of the host": lambda x: x * torch.tensor(2.0) + 1.0,
    "a tensor of one number": lambda x: torch.full((3,), 1.0, device=x.device),
    "a copy from pinned memory": lambda x: pinned(3).to(x.device, non_blocking=True),
    "numbers written under a mask": lambda x: x.clone().__setitem__(x > 1, 0.0),
    "a row": lambda x: x[1],
}


@pytest.mark.parametrize("operation", FREE.values(), ids=FREE)
def test_what_the_device_does_by_itself_is_no_wait(
    device: FakeCuda, tensor: Tensor, operation: Callable[[Tensor], Any]
) -> None:
    operation(tensor)
    traffic = device.take()
    assert traffic.waits == [] and traffic.num_bytes_down == 0


def test_what_comes_down_is_garbage_until_it_is_waited_for(device: FakeCuda, tensor: Tensor) -> None:
    copy = torch.empty(3, 4, pin_memory=True).copy_(tensor, non_blocking=True)
    expected = list(range(12))
    assert copy.flatten().tolist() != expected
    with pytest.raises(AssertionError, match="not waited for"):
        device.take()
    torch.cuda.current_stream().synchronize()
    assert copy.flatten().tolist() == expected
    assert device.take().num_bytes_down == 48


def test_an_event_is_waited_for_once(device: FakeCuda, tensor: Tensor) -> None:
    event = torch.cuda.Event(enable_timing=True)
    (tensor + 1).sum()
    event.record(torch.cuda.current_stream())
    event.synchronize()
    (tensor + 1).sum()  # after the event
    event.synchronize()
    assert len(device.take().waits) == 1


def test_a_capture_forbids_waits_and_is_replayed(device: FakeCuda, tensor: Tensor) -> None:
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(4, device=DEVICE)
    with torch.inference_mode(), torch.cuda.graph(graph):
        total.copy_(tensor.sum(dim=0))
    tensor += 1
    graph.replay()
    assert total.tolist() == [15.0, 18.0, 21.0, 24.0]
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        tensor.cpu()


def test_modules_move_and_keep_their_parameters(device: FakeCuda) -> None:
    linear = nn.Linear(4, 2)
    before = linear.weight.detach().clone()
    linear.to("cuda")
    assert isinstance(linear.weight, nn.Parameter) and linear.weight.device == DEVICE
    assert linear(torch.ones(1, 4, device=DEVICE)).device == DEVICE
    assert torch.equal(linear.weight.cpu(), before)
