"""`outrider scale`: what it says of a pool, and where no launcher answers. With one: tests/service/test_registry.py."""

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.scale import _is_reached, _line
from outrider.v1 import registry_pb2 as pb


@pytest.mark.parametrize(
    ("size", "line", "is_reached"),
    [
        (pb.PoolSize(role=pb.ROLE_DRAFT, num_desired=2, num_serving=2), "small (draft): 2 serving, 2 wanted", True),
        (
            pb.PoolSize(role=pb.ROLE_TARGET, num_desired=1, num_serving=1, num_starting=2, num_draining=3),
            "small (target): 1 serving, 2 starting, 3 draining, 1 wanted",
            False,
        ),
        (pb.PoolSize(num_desired=3, num_serving=1), "small (unknown): 1 serving, 3 wanted", False),
    ],
)
def test_a_pool_is_a_line(size: pb.PoolSize, line: str, is_reached: bool) -> None:
    size.pool = "small"
    assert (_line(size), _is_reached(size)) == (line, is_reached)


def test_no_launcher_there_is_one_line_with_the_remedy() -> None:
    made = CliRunner().invoke(app, ["scale", "--registry", "127.0.0.1:1"])
    assert made.exit_code == 1 and not made.stdout
    assert "no answer from the registry" in made.stderr and "say --registry HOST:PORT" in made.stderr
    assert "Traceback" not in made.stderr
