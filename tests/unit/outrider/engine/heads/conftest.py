"""The target of most heads here."""

import pytest

from tests.unit.outrider.engine.heads.layouts import target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return target(tmp_path_factory.mktemp("heads") / "target")
