"""A draft whose guesses at temperature 0 are texts of its own, however many tokens are one in both:
`python -m benchmarks.text_draft`.
"""

import sys

from draft_service.worker import start_worker
from outrider.drafting import translation
from outrider.wire.processes.worker_main import leave, run_worker
from outrider.wire.settings.config import DraftConfig

if __name__ == "__main__":
    assert hasattr(translation, "SMALL_OVERLAP"), "what is replaced here has another name now"
    translation.SMALL_OVERLAP = 1.1
    leave(run_worker("draft", DraftConfig, start_worker, sys.argv[1:]))
