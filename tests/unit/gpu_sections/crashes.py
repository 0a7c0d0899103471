from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    bench.tell("row", name="before")
    raise ZeroDivisionError("planted")
