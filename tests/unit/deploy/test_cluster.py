"""Whose token the Ray has that the launcher starts itself, and what is said where another Ray has another one."""

import os

import pytest
from ray.exceptions import AuthenticationError

from deploy.cluster import Cluster, own_authentication
from outrider.wire.errors import ConfigError


def test_each_start_has_a_token_of_its_own() -> None:
    first, second = own_authentication({}), own_authentication({"RAY_AUTH_TOKEN": ""})
    assert first["RAY_AUTH_MODE"] == second["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize(
    ("exported", "added"),
    [
        ({"RAY_AUTH_TOKEN": "theirs"}, {"RAY_AUTH_MODE": "token"}),
        ({"RAY_AUTH_TOKEN_PATH": "/their/token"}, {"RAY_AUTH_MODE": "token"}),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs"}, {}),
        ({"RAY_AUTH_MODE": "disabled"}, {}),
    ],
)
def test_what_the_operator_exported_holds(exported: dict[str, str], added: dict[str, str]) -> None:
    assert own_authentication(exported) == added


def test_a_refused_token_of_the_cluster_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster") from AuthenticationError("InvalidAuthToken")

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # it is set there, and must not stay
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ConfigError, match="Failed to connect to Ray cluster: its token is not RAY_AUTH_TOKEN"):
        Cluster("auto").__enter__()


@pytest.mark.parametrize("num_slow", [1, 2])
def test_a_ray_that_was_not_up_in_time_is_started_once_more(monkeypatch: pytest.MonkeyPatch, num_slow: int) -> None:
    started = []

    def init(**given: object) -> None:
        started.append(given)
        if len(started) <= num_slow:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("deploy.cluster.os.environ", dict(os.environ))
    monkeypatch.setattr("deploy.cluster.become_subreaper", lambda: None)
    monkeypatch.setattr("deploy.cluster.end_descendants", lambda _: [])
    if num_slow == 1:
        Cluster(None).__enter__().__exit__(None, None, None)
    else:
        with pytest.raises(ConfigError, match=r"no Ray on this machine: .* timed out during startup"):
            Cluster(None).__enter__()
    assert len(started) == 2
