import os
import signal

from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    """End as the kernel ends who takes the host's last memory."""
    bench.tell("row", name="before")
    os.kill(os.getpid(), signal.SIGKILL)
