"""What a layer keeps beside keys and values: cut, shared and read with its tokens, and tested at load."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import argument, call, drop, drop_element, statement

PATHS = "outrider.engine.attention"
ENGINE = ("tests/unit/outrider/engine/architectures/test_layer_memory.py",)

LAYER_MEMORY: Faults = {
    ENGINE: {
        "a shared block that is written to loses the indexer's keys and the convolution's inputs of its tokens": Fault(
            f"{PATHS}:BlockLayer.storages", drop_element("more")
        ),
        "after a rollback a convolution reads a token further back": Fault(
            f"{PATHS}:DenseLayer.update_conv_state", argument("_read", 1, to="max(_ - 1, 0)")
        ),
        "what a step without drafts fed is missing when the next one reads": Fault(
            f"{PATHS}:DenseLayer.update_conv_state", statement("_write", to="if self.plan.num_queries > 1:\n    _")
        ),
        "a shorter row's blocks begin where its padding ends, and other keys are selected": Fault(
            f"{PATHS}:DensePath.forward", argument("group_rows", "of_equal_length", to="False")
        ),
        "an indexer that selects every key of the self-test passes it, whatever it kept": Fault(
            "outrider.engine.architectures:selecting_few_keys", call("min", to="_0")
        ),
        "a class whose memory is lost where a prefix is shared is served": Fault(
            "outrider.engine.loading:_run_sequences", drop("begin_with")
        ),
    }
}
