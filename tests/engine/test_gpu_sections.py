"""The GPU kit's sections at a rehearsal's sizes on the CPU, and that they find what is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from benchmarks.gpu import (
    draft,
    heads,
    kernels,
    law_times,
    laws,
    load,
    memory,
    models,
    parity,
    prompts,
    served,
    services,
    steps,
)
from benchmarks.gpu.bench import DEMO_TARGET, Bench
from outrider.engine.loading.loader import load_runner
from outrider.engine.sampling import acceptance
from outrider.lab.models.reference_generate import Generated
from outrider.lab.models.widening import Sizes
from outrider.wire.settings.config import TargetConfig
from tests.stack import Process
from tests.unit.outrider.engine.cuda.fake_cuda import fake_cuda

CPU = torch.device("cpu")


class Told:
    """A bench whose events are kept."""

    def __init__(self) -> None:
        self.bench = Bench(io.StringIO(), "cpu", rehearse=True)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        stream = self.bench.events
        assert isinstance(stream, io.StringIO)
        events = [json.loads(line) for line in stream.getvalue().splitlines()]
        return [event for event in events if event["kind"] == kind]

    @property
    def findings(self) -> list[str]:
        return [row["text"] for row in self.rows("finding")]

    @property
    def summary(self) -> str:
        return str(self.rows("summary")[-1]["text"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Told:
    made = Told()
    monkeypatch.setattr(made.bench, "folder", lambda num_bytes=0: tmp_path)
    return made


def test_laws_are_the_targets_and_the_draws_the_hosts(told: Told) -> None:
    laws.run(told.bench)
    assert not told.findings and [row["rule"] for row in told.rows("law")] == [
        "rejection, by token",
        "rejection, by block",
        "the target's own draws",
    ]
    assert {row["outcome"] for row in told.rows("coupled")} == {"the same bits"}


def test_a_rule_that_skips_the_residual_is_found(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """A rejected draft is replaced by a draw from the target's own law: an error that no text shows."""
    monkeypatch.setattr(acceptance, "residual", lambda target, draft: target)
    found = {name: fitted["p_value"] for name, fitted in laws.laws(CPU, 16_384)}
    assert found["rejection, by token"] < laws.P_WRONG and found["rejection, by block"] < laws.P_WRONG
    assert found["the target's own draws"] >= laws.P_WRONG


@pytest.mark.parametrize(("statistic", "degrees"), [(0.0, 1), (3.84, 1), (99.0, 99), (150.0, 99), (400.0, 99)])
def test_p_values_are_those_of_the_chi_square_law(statistic: float, degrees: int) -> None:
    assert laws.chi_square_tail(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-6)


def test_counts_are_compared_pair_by_pair() -> None:
    size = laws.VOCAB_SIZE
    expected = torch.full((size, size), size**-2, dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(size), torch.arange(size)).repeat(10, 1)
    assert laws.fit(pairs, expected)["statistic"] == pytest.approx(0.0)
    moved = pairs.clone()
    moved[:10] = pairs[-1]  # the first ten pairs come once too seldom, the last one ten times too often
    assert laws.fit(moved, expected)["statistic"] == pytest.approx((10 * 1 + 100) / 10)


def test_kernels_are_compared_with_float64_and_a_mask_that_is_off_by_one_is_found(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.run(told.bench)
    assert not told.findings, told.findings
    assert {row["rows"] for row in told.rows("kernel")} == {case.name for case in kernels.CASES}
    wrong = Told()
    right = kernels.seen

    def shifted(num_tokens: int, parents: Any, num_queries: int, window: Any, chunk: Any) -> Any:
        sees = right(num_tokens, parents, num_queries, window, chunk).copy()
        sees[:, 0] = False
        return sees

    monkeypatch.setattr(kernels, "seen", shifted)
    kernels.run(wrong.bench)
    assert wrong.findings


@pytest.mark.parametrize("section", [steps, prompts, law_times, draft, memory], ids=lambda module: module.__name__)
def test_a_section_of_speed_tells_its_rows(section: Any, told: Told) -> None:
    section.run(told.bench)
    assert not told.findings, told.findings
    assert told.summary
    kind = {steps: "step", prompts: "prompt", law_times: "law", draft: "draft step", memory: "load"}[section]
    assert told.rows(kind)


def test_steps_stand_beside_their_floor(told: Told) -> None:
    steps.run(told.bench)
    rows = told.rows("step")
    assert [(row["slots"], row["rows"]) for row in rows[:3]] == [(1, "1 row"), (1, "5 rows"), (1, "tree of 8")]
    assert all(row["eager_ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    shape = models.TINY
    num_read = told.rows("model")[0]["parameters"] * 2 - 2 * shape.vocab * shape.hidden  # not the embedding
    kv_bytes = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    assert told.rows("model")[0]["kv_bytes_a_token"] == kv_bytes
    ratio = rows[3]["floor_ms"] / rows[0]["floor_ms"]  # two slots beside one, of 65 tokens each
    assert ratio == pytest.approx((num_read + 2 * 65 * kv_bytes) / (num_read + 65 * kv_bytes))


def test_paths_are_loaded_and_an_answer_that_differs_is_found(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    load.run(told.bench)
    assert not told.findings
    assert [(row["path"], row["answer"]) for row in told.rows("path")] == [
        (path, "the same") for path in ("fused", "paged", "dense", "fused")
    ]
    wrong = Told()
    monkeypatch.setattr(load, "greedy", lambda runner, prompt, num: [1] * num)
    load._load(wrong.bench, "paged", "float32", Generated([5, 6], [7, 8], [0.5, 0.5]))
    assert len(wrong.findings) == 1 and "DIFFERS at token 0: 1 for 7, gap 0.500" in wrong.findings[0]
    assert load.difference([7, 1], Generated([5, 6], [7, 8], [0.5, 0.04])) == "near tie at token 1: 1 for 8, gap 0.040"


def test_a_widened_pair_says_the_same_in_a_larger_vocabulary(tmp_path: Path) -> None:
    sizes = Sizes(hidden=512, intermediate=1280, heads=8, kv_heads=2, extra_layers=1)
    wide, difference = models.widened(DEMO_TARGET, sizes, 6000, "cpu", torch.float32)
    assert difference < 1e-3
    assert (
        float(wide.get_input_embeddings().weight[4096:].norm(dim=1).min()) > 0
    )  # or a self-test of such ids has zeros
    models.save(wide, tmp_path / "wide")
    ids = [list(range(40, 52)), list(range(300, 312))]
    rows = wide(torch.tensor(ids)).logits.float().log_softmax(-1)
    assert float(rows[..., 4096:].exp().sum(-1).max()) < 1e-3
    runners = [
        load_runner(TargetConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_tokens=512))
        for folder in (tmp_path / "wide", DEMO_TARGET)
    ]
    assert runners[0].facts.vocab_size == 6000
    wide_ids, own_ids = (load.greedy(runner, ids[0], 12) for runner in runners)
    assert wide_ids == own_ids


def test_files_that_are_written_from_a_device_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b.c": torch.arange(7, dtype=torch.float32),
        "d": torch.randn(4, 4).t(),
    }
    models.write_safetensors(tensors, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    "section",
    [*(pytest.param(section, marks=pytest.mark.slow) for section in (steps, law_times, draft)), kernels, laws],
    ids=lambda module: module.__name__,
)
def test_a_section_runs_on_a_device(section: Any, told: Told) -> None:
    """Its own tensors are where the product's are, on a device that refuses two in one operation."""
    told.bench.device = "cuda"
    with fake_cuda():
        section.run(told.bench)
    assert not told.findings, told.findings
    assert told.summary


class ForkedWorker:
    """A worker as the tests start theirs: its imports are done."""

    load_s = 0.0

    def __init__(self, role: str, **settings: Any) -> None:
        self.role = role
        self._process = Process(f"{role}_service", services.flags(settings), wait=False)

    def address(self) -> str:
        return self._process.address

    def log(self, num_lines: int = 200) -> list[str]:
        return []

    def stop(self) -> None:
        self._process.kill()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (parity, heads, served):
        monkeypatch.setattr(module, "Worker", ForkedWorker)
    yield


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
def test_a_pair_is_served_without_http(told: Told) -> None:
    parity.run(told.bench)
    assert not told.findings, told.findings
    assert [row["mode"] for row in told.rows("cell")] == list(parity.MODES)
    assert all(row["drafted"] for row in told.rows("cell") if row["mode"] not in ("plain", "auto"))
    heads.run(told.bench)
    assert not told.findings, told.findings
    assert [row["outcome"] for row in told.rows("head")] == ["the target's answer"] * 2


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
def test_placements_are_measured_and_one_that_fails_leaves_the_others(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ForkedWorker):
        def address(self) -> str:
            if self.role == "draft":
                raise RuntimeError("planted")
            return super().address()

    monkeypatch.setattr(served, "Worker", Broken)
    served.run(told.bench)
    assert told.findings == ["draft on the CPU: RuntimeError: planted"]
    (cell,) = told.rows("cell")
    assert cell["placement"] == "plain" and cell["tokens_per_s"] > 0 and cell["drafted_a_round"] == 0
