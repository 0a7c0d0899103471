"""What a layer keeps beside keys and values: cut, shared and read with its tokens, and tested at load."""

from tests.mutants import Mutant
from tests.mutants.operators import argument, call, drop, drop_element, statement

PATHS = "outrider.engine.attention"
ENGINE = ("tests/unit/outrider/engine/architectures/test_layer_memory.py",)

LAYER_MEMORY = (
    Mutant(
        f"{PATHS}:BlockLayer.storages",
        drop_element("more"),
        "a shared block that is written to loses the indexer's keys and the convolution's inputs of its tokens",
        ENGINE,
    ),
    Mutant(
        f"{PATHS}:DenseLayer.update_conv_state",
        argument("_read", 1, to="max(_ - 1, 0)"),
        "after a rollback a convolution reads a token further back",
        ENGINE,
    ),
    Mutant(
        f"{PATHS}:DenseLayer.update_conv_state",
        statement("_write", to="if self.plan.num_queries > 1:\n    _"),
        "what a step without drafts fed is missing when the next one reads",
        ENGINE,
    ),
    Mutant(
        f"{PATHS}:DensePath.forward",
        argument("group_rows", "of_equal_length", to="False"),
        "a shorter row's blocks begin where its padding ends, and other keys are selected",
        ENGINE,
    ),
    Mutant(
        "outrider.engine.architectures:selecting_few_keys",
        call("min", to="_0"),
        "an indexer that selects every key of the self-test passes it, whatever it kept",
        ENGINE,
    ),
    Mutant(
        "outrider.engine.loading:_run_sequences",
        drop("begin_with"),
        "a class whose memory is lost where a prefix is shared is served",
        ENGINE,
    ),
)
