"""Files of look-ahead embeddings, and what is no such file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.engine.loading.embedding_files import read_embeddings
from outrider.wire.errors import ConfigError


def test_files_that_are_no_embeddings_of_the_target_are_refused_by_name(tmp_path: Path) -> None:
    def fails(message: str, source: Path) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            read_embeddings(str(source), 8)
        assert error.value.param == "lookahead_embeddings"

    def made(name: str, **tensors: torch.Tensor) -> Path:
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    fails("missing cannot be read: .*; name a file that outrider train-head pass wrote", tmp_path / "missing")
    fails(
        "which holds the tensors a, embeddings, must hold embeddings alone",
        made("two", a=torch.zeros(1), embeddings=torch.zeros(2, 8)),
    )
    fails(r"are \[2, 9\], must be \[1 to 64, 8\]", made("wide", embeddings=torch.zeros(2, 9)))
    fails(r"are \[65, 8\]", made("many", embeddings=torch.zeros(65, 8)))
    fails("not finite", made("nan", embeddings=torch.full((2, 8), torch.nan)))
    assert read_embeddings(str(made("good", embeddings=torch.ones(2, 8))), 8).shape == (2, 8)
