"""What is found of a target and its drafts."""

from outrider.engine import checkup
from outrider.engine.model_check import CheckTask
from tests.stack import DEMO_TARGET


def pair(*drafts: str, target: str = DEMO_TARGET, dtype: str = "auto") -> dict[str, tuple[str, str, str]]:
    """What is found of a target and drafts, by check."""
    return dict(checkup.findings(CheckTask(target, list(drafts), "cpu", dtype)))
