"""`outrider pull` of a model from a mirror on this machine, and what came of it."""

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from outrider.cli.main import app

MODEL = "team/model"
SMALL = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ messages }}"}
SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 200_000 for i in (1, 2)}
INDEX = json.dumps({"weight_map": {f"layer.{i}": name for i, name in enumerate(SHARDS)}}).encode()
NEEDED = {**SMALL, **SHARDS, "model.safetensors.index.json": INDEX}
OTHER_FORMS = dict.fromkeys(
    ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "onnx/model.onnx", "README.md"), b"the same again"
)


def pulled(*args: str) -> Result:
    return CliRunner().invoke(app, ["pull", MODEL, *args])


def refused(made: Result, *words: str) -> None:
    assert made.exit_code == 1 and not made.stdout
    error = made.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in error, made.stderr


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
