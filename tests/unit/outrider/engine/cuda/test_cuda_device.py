"""What only a GPU can say: torch's own kernel, captures and copies, where the other tests have stand-ins."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.host_copy import DeviceMoment, to_host
from outrider.engine.loading.loader import load_runner
from outrider.engine.loading.self_test import TOLERANCE, largest_error
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row
from outrider.wire.settings.config import TargetConfig
from tests.coupled_bits import check_ids, check_logarithm, check_noise
from tests.tiny_models import tiny_llama

MAX_ROWS = 4


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, UncachedModel]:
    """A tiny Llama, accepted by the self-test on the flash path."""
    folder = tiny_llama(tmp_path_factory.mktemp("gpu"), hidden_size=128, sharpness=3.0, context=1024)
    flash = {"device": "cuda", "dtype": "bfloat16", "attention_path": "flash"}
    runner = load_runner(TargetConfig(model=folder, kv_cache_tokens=64 * 256, max_slots=MAX_ROWS, **flash))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    return runner, UncachedModel(model)


def graphed(runner: ModelRunner) -> GraphedPath:
    assert isinstance(runner.path, GraphedPath)
    if runner.path._graphs is None:
        runner.path.prepare(MAX_ROWS, runner.facts.context_limit)
    return runner.path


@gpu
def test_everything_is_captured_and_agrees_with_eager_steps(loaded: tuple[ModelRunner, UncachedModel]) -> None:
    runner, truth = loaded
    path = graphed(runner)
    before = path.captured
    assert len(before) == 15
    for _ in range(3):
        assert largest_error(runner, truth) <= TOLERANCE["bfloat16"]
    assert path.captured == before  # none differed


@gpu
def test_rows_of_several_pages_read_their_own_tokens(loaded: tuple[ModelRunner, UncachedModel]) -> None:
    runner, truth = loaded
    generator = random.Random(1)
    sequences = [[generator.randrange(320) for _ in range(n)] for n in (900, 300, 513)]
    tables = [runner.pool.new_table() for _ in sequences]
    for table, ids in zip(tables, sequences, strict=True):
        runner.forward([Row.of(table, ids[:-6], 0, 0)])
    rows = [Row.of(table, ids, len(ids) - 6, 6) for table, ids in zip(tables, sequences, strict=True)]
    expected = torch.cat([truth.forward(ids)[-6:] for ids in sequences])
    difference = (runner.forward(rows) - expected).abs().max() / expected.abs().max()
    assert float(difference) <= TOLERANCE["bfloat16"]
    for table in tables:
        table.free()


@gpu
def test_a_copy_to_the_host_is_there_when_it_is_returned() -> None:
    tensor = torch.full((1 << 24,), 1.0, device="cuda")
    (copy,) = to_host(tensor * 2)
    assert bool((copy == 2.0).all()) and copy.is_pinned()


@gpu
def test_a_forward_is_timed_to_its_end() -> None:
    device, tensor = torch.device("cuda"), torch.ones(8192, 8192, device="cuda")
    began = DeviceMoment(device)
    for _ in range(20):
        tensor = tensor @ tensor
    assert DeviceMoment(device).seconds_since(began) > 0.01  # 22 TFLOP; to launch them takes microseconds


@gpu
def test_coupled_noise_is_the_hosts_to_the_last_bit() -> None:
    """A fused multiply-add or a library's own logarithm would change it, and so which id is said."""
    check_logarithm("cuda")
    check_noise("cuda", vocab_size=128_256)


@gpu
@pytest.mark.parametrize("vocab_size", [301, 128_256])
def test_coupled_ids_are_the_hosts(vocab_size: int) -> None:
    check_ids("cuda", vocab_size)
