from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    bench.find("something is wrong")
    bench.find("and more")
    bench.sum_up("not said, for there are findings")
