"""Which hosts are allowed."""

import pytest
import yaml

from outrider.wire.processes.origin import read_host_names
from tests.unit.deploy.compose_files import REPO, services


@pytest.mark.parametrize("said", ["", "llm.example", "*"])
def test_prometheus_may_call_the_gateway_by_its_name_whatever_hosts_are_allowed(said: str) -> None:
    value = services()["gateway"]["environment"]["OUTRIDER_GATEWAY_ALLOWED_HOSTS"]
    names = read_host_names(value.replace("${OUTRIDER_GATEWAY_ALLOWED_HOSTS:-}", said))
    assert names is None if said == "*" else names == {"gateway", said} - {""}
    prometheus = yaml.safe_load((REPO / "deploy/prometheus/prometheus.yml").read_text())
    targets = [
        one for job in prometheus["scrape_configs"] for each in job.get("static_configs", ()) for one in each["targets"]
    ]
    assert "gateway:9000" in targets
