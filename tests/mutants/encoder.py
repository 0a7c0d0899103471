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
        CROSS,
        "with self._positions.told(plan.position_ids), self._distances",
        "with self._positions.told(plan.position_ids + 1), self._distances",
        "on BART a decoder's tokens are one place further than they are",
        (f"{ENGINE}::test_answers_that_join_and_leave_a_batch_are_those_of_generate",),
    ),
    Mutant(
        CROSS,
        '                "attention_mask": across.mask,\n',
        '                "attention_mask": None,\n',
        "a short source is read with what lies behind it",
        (f"{ENGINE}::test_answers_that_join_and_leave_a_batch_are_those_of_generate",),
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
