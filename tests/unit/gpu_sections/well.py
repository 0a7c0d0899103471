from benchmarks.gpu.bench import Bench


def run(bench: Bench) -> None:
    print("not an event")
    bench.tell("row", name="a", value=1.5)
    bench.tell("row", name="b", value=2.5, more="|")
    bench.sum_up("all is well")
