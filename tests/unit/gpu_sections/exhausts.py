import resource

from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    """Take memory until there is none: of an address space that is bounded, so that the machine's stays."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    taken = []
    while True:
        taken.append(bytearray(1 << 26))
