"""The mirror that models are pulled from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_mirror import Mirror, mirroring
from tests.unit.outrider.cli.models.pulled import MODEL, NEEDED, OTHER_FORMS


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    with mirroring(MODEL, {**NEEDED, **OTHER_FORMS}) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made
