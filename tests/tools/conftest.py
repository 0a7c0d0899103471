"""Where the tools are: `make tools` installs them and says so. Without them there is nothing to collect here."""

import os

collect_ignore_glob = [] if "OUTRIDER_TOOLS" in os.environ else ["test_*.py"]
