"""Templates of chats."""

import json
from pathlib import Path
from typing import Any

from outrider.v1.common_pb2 import TokenizerFiles

DEMO = Path(__file__).parents[3] / "models/demo/target"


def files(config: dict[str, Any] | None = None, template: str = "") -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer_json=(DEMO / "tokenizer.json").read_bytes(),
        tokenizer_config_json=b"" if config is None else json.dumps(config).encode(),
        chat_template=template.encode(),
    )
