"""What `outrider report` measures where torch is: laws that are right and one that is not, and steps of both kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy import stats

from outrider.cli.reporting.document import P_WRONG
from outrider.engine.loading.loader import load_runner
from outrider.engine.reporting import laws, steps
from outrider.engine.reporting.laws import VOCAB_SIZE
from outrider.engine.reporting.steps import NUM_WARM, StepsTask
from outrider.engine.sampling import acceptance
from outrider.wire.settings.config import TargetConfig
from tests.engine.cuda_tape import TapeMaker
from tests.engine.test_cuda_graphs import make
from tests.tiny_models import tiny_llama
from tests.zoo import ARCHITECTURES

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def p_values() -> dict[str, float]:
    return {event["rule"]: event["p_value"] for event in laws.laws(CPU) if event["event"] == "law"}


def test_every_rule_has_the_targets_law() -> None:
    found = p_values()
    assert list(found) == ["rejection, by token", "rejection, by block", "the target's own draws"]
    assert all(p >= 0.01 for p in found.values()), found


def test_a_rule_that_skips_the_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft is replaced by a draw from the target's own law: an error that no text shows."""
    monkeypatch.setattr(acceptance, "residual", lambda target, draft: target)
    found = p_values()
    assert found["rejection, by token"] < P_WRONG and found["rejection, by block"] < P_WRONG
    assert found["the target's own draws"] >= P_WRONG


@pytest.mark.parametrize(("statistic", "degrees"), [(0.0, 1), (3.84, 1), (99.0, 99), (150.0, 99), (400.0, 99)])
def test_p_values_are_those_of_the_chi_square_law(statistic: float, degrees: int) -> None:
    assert laws.chi_square_tail(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-6)


def test_counts_are_compared_pair_by_pair() -> None:
    expected = torch.full((VOCAB_SIZE, VOCAB_SIZE), VOCAB_SIZE**-2, dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(VOCAB_SIZE), torch.arange(VOCAB_SIZE)).repeat(10, 1)
    assert laws.fit(pairs, expected)["statistic"] == pytest.approx(0.0)
    moved = pairs.clone()
    moved[:10] = pairs[-1]  # the first ten pairs come once too seldom, the last one ten times too often
    assert laws.fit(moved, expected)["statistic"] == pytest.approx((10 * 1 + 100) / 10)


def test_steps_are_timed_beside_their_floor(model: str) -> None:
    task = StepsTask(model, "cpu", "auto", [1, 2], 5, 32, 1)
    loaded, bandwidth, *timed = steps.steps(task)
    assert loaded["event"] == "loaded" and loaded["path"] == "fused" and loaded["device"] == "cpu"
    assert any("takes the path fused" in line for line in loaded["log"])
    assert bandwidth["bytes_per_s"] > 1e8
    assert [(each["rows"], each["tokens"]) for each in timed] == [(1, 1), (1, 6), (2, 1), (2, 6)]
    assert all(each["eager_s"] > 0 and "graph_s" not in each for each in timed)
    floors = [each["floor_s"] * bandwidth["bytes_per_s"] for each in timed]
    cached_bytes = (floors[1] - floors[0]) / 5  # of a token
    assert cached_bytes >= 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, their width, float32
    assert floors[3] - floors[1] == pytest.approx(38 * cached_bytes)
    embedding_bytes = 320 * 32 * 4  # not the output matrix
    assert floors[1] - 38 * cached_bytes == pytest.approx(loaded["num_weight_bytes"] - embedding_bytes)


def test_what_a_step_reads_depends_on_windows_and_experts() -> None:
    made = {name: one.config.get_text_config(decoder=True) for name, one in ARCHITECTURES.items()}
    mixtures = {name for name, one in ARCHITECTURES.items() if "MoE" in one.notes}
    assert {name for name, config in made.items() if steps.is_mixture(config)} == mixtures
    seen = {name: steps.seen_tokens(made[name], context=40, width=6) for name in ("llama", "mistral", "llama4_text")}
    assert seen == {"llama": 46, "mistral": 16 + 5, "llama4_text": (46 + (46 - 32)) / 2}


def test_a_context_that_is_shorter_than_asked_for_is_taken_whole(model: str) -> None:
    *_, last = steps.steps(StepsTask(model, "cpu", "auto", [1], 5, 512, 1))
    assert last["context"] == 250


def test_graphs_and_eager_steps_take_turns(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = TapeMaker()
    runner, path, _ = make("llama", maker)
    monkeypatch.setattr(steps, "load_runner", lambda config: runner)
    _, graphs, _, *timed = steps.steps(StepsTask(model, "cpu", "auto", [1, 2], 5, 20, 2))
    assert graphs["event"] == "graphs"
    assert set(graphs["captured"]) == set(map(str, path.captured)) and "2 rows of 6 tokens" in graphs["captured"]
    assert all(each["eager_s"] > 0 and each["graph_s"] > 0 for each in timed)
    proofs = len(path.captured)
    assert maker.num_replays - proofs == len(timed) * (NUM_WARM + 2)


def test_an_embedding_that_is_not_the_output_matrix_is_not_read(model: str) -> None:
    runner = load_runner(TargetConfig(model=model, device="cpu", attention_path="paged", kv_cache_tokens=256))
    all_bytes = 4 * runner.facts.num_parameters
    assert steps.read_bytes(runner, is_tied=True) == all_bytes
    assert steps.read_bytes(runner, is_tied=False) == all_bytes - 4 * 320 * 32
    runner.facts = replace(runner.facts, vocab_size=0)
    assert steps.read_bytes(runner, is_tied=False) == all_bytes
