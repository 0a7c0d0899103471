"""What the SDK exports and its documents show."""

import re
import subprocess
import sys
from pathlib import Path

from tests.unit.outrider.client.scripted_gateway import ScriptedGateway


def test_importing_the_sdk_loads_no_server_and_no_torch() -> None:
    heavy = ("torch", "transformers", "ray", "fastapi", "uvicorn", "prometheus_client", "gateway", "outrider.engine")
    script = f"import sys, outrider.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_documents_examples_run(gateway: ScriptedGateway) -> None:
    text = (Path(__file__).parents[4] / "docs" / "sdk.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    of_a_gateway = [block for block in blocks if "LLM(" not in block]  # the other one: tests/e2e/test_llm.py
    assert len(of_a_gateway) >= 4
    for block in of_a_gateway:
        exec(compile(block.replace("127.0.0.1:8001", gateway.address), "docs/sdk.md", "exec"), {})
    assert len(gateway.requests) == 2
