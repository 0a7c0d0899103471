"""Where the tools are: `make tools` installs them and says so. Without them there is nothing to collect here."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "OUTRIDER_TOOLS" in os.environ else ["test_*.py"]
