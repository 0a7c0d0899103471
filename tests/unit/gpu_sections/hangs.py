import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    """Hang with a child of another process group and a folder in memory that nobody removes."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    folder = bench.folder()
    Path(folder, "model").write_bytes(b"weights")
    bench.tell("started", pid=child.pid, own=os.getpid(), folder=str(folder))
    time.sleep(600)
