"""Sources of encoder-decoder models, and where their decoders' tokens are."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import call

ENGINE, SLOTS = (
    "tests/unit/outrider/engine/attention/test_cross_attention.py",
    ("tests/unit/outrider/engine/worker/test_source_slot.py",),
)

ENCODER: Faults = {
    (f"{ENGINE}::test_facts",): {
        "on T5 a tree's nodes are as far apart as their columns": Fault(
            "outrider.engine.attention:DecoderDistances.using", call("positions", to="range(_self.num_tokens)")
        )
    },
    SLOTS: {
        "who asks under another cache salt learns from the time of its answer what others have translated": Fault(
            "outrider.engine.worker:SourceSlot.__init__", call("_salt", "source", to='_f(_0, b"", _2)')
        ),
        "an answer to one source goes on from what was computed under another": Fault(
            "outrider.engine.worker:SourceSlot.__init__", call("_salt", "decoder", to="_f(_0, _1, ())")
        ),
    },
}
