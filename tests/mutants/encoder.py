"""Sources of encoder-decoder models, and where their decoders' tokens are."""

from tests.mutants import Mutant

CROSS, SLOT = "outrider/engine/paths/cross_attention.py", "outrider/engine/worker/source_slot.py"
ENGINE, SLOTS = "tests/engine/test_encoder_decoder.py", ("tests/unit/test_slots.py",)

ENCODER = (
    Mutant(
        CROSS,
        "own[plan.kv_len - row.num_tokens :] = row.positions(0)",
        "own[plan.kv_len - row.num_tokens :] = range(row.num_tokens)",
        "on T5 a tree's nodes are as far apart as their columns",
        (f"{ENGINE}::test_facts",),
    ),
    Mutant(
        SLOT,
        '_salt(b"source", cache_salt, source_ids)',
        '_salt(b"source", b"", source_ids)',
        "who asks under another cache salt learns from the time of its answer what others have translated",
        SLOTS,
    ),
    Mutant(
        SLOT,
        '_salt(b"decoder", cache_salt, source_ids)',
        '_salt(b"decoder", cache_salt, ())',
        "an answer to one source goes on from what was computed under another",
        SLOTS,
    ),
)
