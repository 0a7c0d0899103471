"""Draft heads: what is read of their files, and the forward. A fault drafts fluently and is accepted less."""

from tests.mutants import Fault, Faults
from tests.mutants.operators import (
    always,
    argument,
    call,
    comparison,
    constant,
    display,
    drop,
    never,
    operation,
    subscript,
)

HEADS_ROOM = "outrider.engine.heads"
JOINED_TESTS, PEAGLE_TESTS = (
    ("tests/unit/outrider/engine/heads/test_joined.py",),
    ("tests/unit/outrider/engine/heads/test_peagle.py",),
)
EAGLE3_TESTS, MEDUSA_TESTS = (
    ("tests/unit/outrider/engine/heads/test_eagle3.py",),
    ("tests/unit/outrider/engine/heads/test_medusa.py",),
)
DFLASH_TESTS, DRAFTER_TESTS = (
    ("tests/unit/outrider/engine/heads/test_dflash.py",),
    ("tests/unit/draft_service/slots/test_block_head_slot.py",),
)

HEADS: Faults = {
    EAGLE3_TESTS: {
        "SpecForge's heads read the layers before theirs": Fault(
            f"{HEADS_ROOM}.eagle3:_taps", constant(1, to="0", nth=(1, 2))
        ),
        "speculators' heads read the layers behind theirs": Fault(f"{HEADS_ROOM}.eagle3:_taps", constant(0, to="1")),
        "original heads read another layer than they were trained on": Fault(
            f"{HEADS_ROOM}.eagle3:_taps", constant(3, to="2")
        ),
        "speculators' norm_output is taken for SpecForge's, and 3.1 drafts worse from the second token on": Fault(
            f"{HEADS_ROOM}.eagle3:_open", argument("Eagle3Config", "is_carry_normed", to="False")
        ),
        "feature and embedding are swapped": Fault(
            f"{HEADS_ROOM}.eagle3:Eagle3Head.run_layers", display("embedded", to="[_1, _0]")
        ),
        "heads whose first residual is normed draft worse": Fault(
            f"{HEADS_ROOM}.eagle3:Eagle3Head.run_layers", never("norm_before_residual")
        ),
        "3.1 drafts worse from the second token on": Fault(
            f"{HEADS_ROOM}:HeadNetwork.forward", never("is_carry_normed")
        ),
        "heads without a last norm draft worse": Fault(
            f"{HEADS_ROOM}:HeadNetwork.forward", always("is_lm_head_normed")
        ),
        "offsets are taken for ids, and other tokens are drafted than were meant": Fault(
            f"{HEADS_ROOM}:target_ids", operation("+", "arange", to="_1")
        ),
        "the self-test sees no difference beside the logits of ids without a row": Fault(
            f"{HEADS_ROOM}:HeadNetwork.mapped", always("draft_ids")
        ),
    },
    JOINED_TESTS: {
        "feature and embedding of EAGLE-1 and MTP heads are swapped": Fault(
            f"{HEADS_ROOM}:JoinedHead.run", display("to", "dtype", to="[_1, _0]")
        ),
        "EAGLE-1 heads want a norm that they do not have": Fault(
            f"{HEADS_ROOM}:JoinedHead.__init__", drop("input_layernorm")
        ),
        "MTP heads that carry the normed output draft worse from the second token on": Fault(
            f"{HEADS_ROOM}:read_mtp", call("startswith", "model_type", to="False")
        ),
    },
    PEAGLE_TESTS: {
        "P-EAGLE heads fill masks that they do not know": Fault(
            f"{HEADS_ROOM}:read_peagle", call("exact", to="0.0 * _")
        ),
        "masks stay in the cache, and what is drafted behind them is wrong": Fault(
            "draft_service:MaskDrafter._make_blocks", drop("truncate")
        ),
    },
    ("tests/unit/outrider/engine/heads/test_projection.py",): {
        "3.1's norms of the taps are taken for one of all": Fault(f"{HEADS_ROOM}:Projection.exact", never("each"))
    },
    MEDUSA_TESTS: {
        "heads of several layers are not read": Fault(f"{HEADS_ROOM}.medusa:_count", operation("+", "int", to="_0"))
    },
    DFLASH_TESTS: {
        "DFlash heads read the layers before theirs": Fault(
            f"{HEADS_ROOM}.dflash:_taps", constant(1, to="0", nth=(6, 6))
        ),
        "DFlash heads that read the target's last state read it before its norm": Fault(
            f"{HEADS_ROOM}.dflash:_taps", comparison("==", to="False")
        ),
        "keys of features are not normed, and DFlash drafts worse": Fault(
            f"{HEADS_ROOM}:BlockHead.read", call("k_norm", to="_0")
        ),
        "blocks have the positions of the features": Fault(
            f"{HEADS_ROOM}:BlockHead.run", argument("fill", 1, to="_ - _.min()")
        ),
    },
    ("tests/unit/outrider/engine/heads/test_network.py",): {
        "DFlash heads of Gemma embed blocks without the target's scale": Fault(
            f"{HEADS_ROOM}.dflash:_facts", argument("DFlashConfig", "embedding_scale", to="1.0")
        )
    },
    ("tests/unit/outrider/engine/attention/test_paged_attention.py", *DFLASH_TESTS): {
        "what is not causal is, where a window makes a mask": Fault(
            "outrider.engine.attention:_seen", always("causal", beside=("broadcast_to",))
        )
    },
    DRAFTER_TESTS: {
        "blocks follow rows that are one off": Fault(f"{HEADS_ROOM}:BlockHead", constant(0, to="1", nth=(1, 4))),
        "a recurrent head begins its state anew at every place": Fault(
            "draft_service:SequentialDrafter._step", subscript("states", to="self._sequential.begin()")
        ),
    },
}
