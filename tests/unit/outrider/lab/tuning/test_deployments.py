"""The settings of a pair's workers in each placement."""

from outrider.lab.tuning.deployments import deployments_of, settings_of, with_cache
from outrider.lab.tuning.money import COLOCATED, SPLIT

ROLES = list(enumerate(("target", "draft")))


def test_both_caches_hold_all_requests_wherever_the_pair_is() -> None:
    """Without it the worker that loads first on one GPU would take nine tenths of what is free."""
    asked = {role: {"model": "a", "device": f"cuda:{index}", "dtype": None, "cpu_cores": None} for index, role in ROLES}
    found = deployments_of(with_cache(asked, ["four", "größer"], 96, 16))
    sizes = {each.worker.kv_cache_tokens for own in found.values() for each in settings_of(own).pools}
    assert sizes == {16 * (8 + 96 + 512)}


def test_the_draft_is_put_on_the_targets_cores() -> None:
    asked = {
        "target": {"model": "a", "device": "cpu", "dtype": None, "cpu_cores": "0"},
        "draft": {"model": "b", "device": None, "dtype": None, "cpu_cores": "1"},
    }
    found = deployments_of(asked)
    assert found[SPLIT] == asked
    assert {role: own["cpu_cores"] for role, own in found[COLOCATED].items()} == {"target": "0", "draft": "0"}
    assert found[COLOCATED]["draft"]["device"] == "cpu"
