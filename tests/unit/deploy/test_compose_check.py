"""What is wrong with a user's own settings of Compose, in the user's words."""

from pathlib import Path

import pytest

from deploy.compose_check import check
from outrider.wire.errors import ConfigError
from tests.unit.deploy.compose_files import REPO


def test_the_check_names_what_is_wrong_in_the_users_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def objection(file: str = "cluster.yaml", **variables: str) -> str:
        with monkeypatch.context() as one:
            for name, value in variables.items():
                one.setenv(name, value)
            with pytest.raises(ConfigError) as caught:
                check(["--config", str(REPO / "deploy/docker" / file)], variables)
        return caught.value.message

    empty, linked = tmp_path / "empty", tmp_path / "linked"
    empty.mkdir()
    linked.mkdir()
    (linked / "config.json").symlink_to("../blobs/1")
    model = {"MODEL": "/srv/chat", "file": "cluster-model.yaml"}
    assert objection(**model, OUTRIDER_TARGET_MODEL=str(empty)) == (
        "MODEL is '/srv/chat', and that is no model's folder: it has no config.json"
    )
    assert "links of a hub's cache lead out" in objection(**model, OUTRIDER_TARGET_MODEL=str(linked))
    assert "which is a file" in objection(**model, OUTRIDER_TARGET_MODEL=__file__)
    assert "name their models: leave one out" in objection(
        MODEL="/srv/chat", OUTRIDER_TARGET_MODEL=str(REPO / "models/demo/target")
    )
    assert objection(DRAFT="/srv/small").startswith("DRAFT is '/srv/small' and MODEL is not set")
    assert objection(OUTRIDER_BNID="0.0.0.0") == "OUTRIDER_BNID is no setting; did you mean OUTRIDER_BIND?"
    assert "did you mean OUTRIDER_GATEWAY_MAX_QUEUE?" in objection(OUTRIDER_GATEWAY_MAX_QUUE="1")
    assert "max_slots" in objection(OUTRIDER_TARGET_MAX_SLOTS="-1")
    assert "file-of-mine" in objection("file-of-mine.yaml")
