"""A draft model in training: what it writes for a draft worker."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from outrider.training.student import Draft, write_tensors


def test_a_draft_is_written_in_bfloat16_and_goes_on_in_float32(folder: Path, tmp_path: Path) -> None:
    student = Draft(str(folder / "draft"), 320, "cpu")
    student.save(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    own = student.module.state_dict()
    assert written and {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    for name, tensor in written.items():
        assert own[name].dtype == torch.float32 and torch.equal(tensor, own[name].to(torch.bfloat16))
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "draft" / "tokenizer.json").read_bytes()


def test_tensors_are_written_for_others_to_read(tmp_path: Path) -> None:
    """A transposed one, too, which safetensors refuses as it is."""
    tensor = torch.arange(6.0).reshape(2, 3).T
    write_tensors(tmp_path, {"a": tensor})
    path = tmp_path / "model.safetensors"
    assert torch.equal(load_file(path)["a"], tensor)
    (tmp_path / "new").touch()
    assert os.stat(path).st_mode == os.stat(tmp_path / "new").st_mode
