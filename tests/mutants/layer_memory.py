"""What a layer keeps beside keys and values: cut, shared and read with its tokens, and tested at load."""

from tests.mutants import Mutant

BLOCKS, DENSE = "outrider/engine/paths/block_cache.py", "outrider/engine/paths/dense.py"
KINDS, SELF_TEST = "outrider/engine/paths/layer_memory.py", "outrider/engine/loading/self_test.py"
ENGINE = ("tests/engine/test_layer_memory.py",)

LAYER_MEMORY = (
    Mutant(
        BLOCKS,
        "        return [*own, *self.more.values()]",
        "        return own",
        "a shared block that is written to loses the indexer's keys and the convolution's inputs of its tokens",
        ENGINE,
    ),
    Mutant(
        DENSE,
        "        past = self._read(storage, num_past - num_read)",
        "        past = self._read(storage, max(num_past - num_read - 1, 0))",
        "after a rollback a convolution reads a token further back",
        ENGINE,
    ),
    Mutant(
        DENSE,
        "        self._write(storage, inputs)\n",
        "        self._write(storage, inputs) if self.plan.num_queries > 1 else None\n",
        "what a step without drafts fed is missing when the next one reads",
        ENGINE,
    ),
    Mutant(
        DENSE,
        "of_equal_length=self._has_equal_rows",
        "of_equal_length=False",
        "a shorter row's blocks begin where its padding ends, and other keys are selected",
        ENGINE,
    ),
    Mutant(
        KINDS,
        "setattr(module, attribute, min(before, limit))",
        "setattr(module, attribute, before)",
        "an indexer that selects every key of the self-test passes it, whatever it kept",
        ENGINE,
    ),
    Mutant(
        SELF_TEST,
        "            c.begin_with(a, min(13, len(c.ids) - 8))",
        "            pass",
        "a class whose memory is lost where a prefix is shared is served",
        ENGINE,
    ),
)
