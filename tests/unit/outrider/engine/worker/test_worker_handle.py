"""A worker that starts."""

import socket

import pytest

from outrider.engine.worker import worker_handle
from outrider.engine.worker.worker_handle import WorkerState
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import TargetConfig


def test_a_worker_looks_at_its_ports_before_it_loads_its_model() -> None:
    def load(*_: object) -> WorkerState:
        raise AssertionError("it loads")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, option in (("port", "--port"), ("metrics_port", "--metrics-port")):
            config = TargetConfig(model="m", **{name: port})
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use; choose .* {option}$"):
                worker_handle.start("target", config, 1, load, load)
