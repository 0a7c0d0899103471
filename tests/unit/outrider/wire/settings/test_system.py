"""The settings of a whole system."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.wire.settings.system import DEMO_NAME, ScalingConfig, SystemConfig, merge_settings, read_yaml
from tests.forked import REPO
from tests.unit.outrider.wire.settings.clusters import CLUSTER, NO_FLAGS


def read(values: dict[str, Any]) -> SystemConfig:
    return SystemConfig.read(values)


@pytest.mark.parametrize("file", [CLUSTER, {}], ids=["pools", "pair"])
def test_one_folder_of_certificates_is_that_of_every_part(file: dict[str, Any], tmp_path: Path) -> None:
    found = merge_settings(copy.deepcopy(file), NO_FLAGS, no_draft=False, no_ray=False, certificates=tmp_path)
    assert {pool.worker.tls_dir for pool in found.target_pools} == {str(tmp_path / "target")}
    assert {pool.worker.tls_dir for pool in found.draft_pools} == {str(tmp_path / "draft")}
    assert found.gateway["tls_dir"] == str(tmp_path / "gateway")
    assert found.ray is not None and found.ray.tls_dir == str(tmp_path / "launcher")


def test_what_the_docs_and_the_examples_show_can_be_read() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/cluster.md").read_text(), re.DOTALL)
    files = [*(REPO / "deploy/examples").glob("*.yaml"), *(REPO / "deploy").glob("*/cluster.yaml")]
    whole, scaling = (yaml.safe_load(text) for text in shown)
    assert [pool.setting for pool in read(whole).pools] == ["targets.chat", "drafts.small"]
    assert read({**whole, **scaling}).scaling == ScalingConfig()  # "the defaults"
    assert len(files) >= 2
    for file in files:
        assert read(read_yaml(file)).target_pools


def test_workers_have_metrics_and_the_demo_pair_its_name() -> None:
    found = merge_settings(CLUSTER, NO_FLAGS, no_draft=False, no_ray=False)
    assert {pool.worker.metrics_port for pool in found.pools} == {0}
    demo = merge_settings({}, NO_FLAGS, no_draft=False, no_ray=False)
    assert [pool.model_name for pool in demo.target_pools] == [DEMO_NAME]
    assert demo.target_pools[0].worker.model.endswith("models/demo/target")
