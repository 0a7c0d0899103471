"""Draft heads: what is read of their files, and the forward. A fault drafts fluently and is accepted less."""

from tests.mutants import Mutant
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

HEADS = (
    Mutant(
        f"{HEADS_ROOM}.eagle3:_taps",
        constant(1, to="0", nth=(1, 2)),
        "SpecForge's heads read the layers before theirs",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.eagle3:_taps",
        constant(0, to="1"),
        "speculators' heads read the layers behind theirs",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.eagle3:_taps",
        constant(3, to="2"),
        "original heads read another layer than they were trained on",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.eagle3:_open",
        argument("Eagle3Config", "is_carry_normed", to="False"),
        "speculators' norm_output is taken for SpecForge's, and 3.1 drafts worse from the second token on",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.eagle3:Eagle3Head.run_layers",
        display("embedded", to="[_1, _0]"),
        "feature and embedding are swapped",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.eagle3:Eagle3Head.run_layers",
        never("norm_before_residual"),
        "heads whose first residual is normed draft worse",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:HeadNetwork.forward",
        never("is_carry_normed"),
        "3.1 drafts worse from the second token on",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:HeadNetwork.forward",
        always("is_lm_head_normed"),
        "heads without a last norm draft worse",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:JoinedHead.run",
        display("to", "dtype", to="[_1, _0]"),
        "feature and embedding of EAGLE-1 and MTP heads are swapped",
        JOINED_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:JoinedHead.__init__",
        drop("input_layernorm"),
        "EAGLE-1 heads want a norm that they do not have",
        JOINED_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:read_mtp",
        call("startswith", "model_type", to="False"),
        "MTP heads that carry the normed output draft worse from the second token on",
        JOINED_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:read_peagle",
        call("exact", to="0.0 * _"),
        "P-EAGLE heads fill masks that they do not know",
        PEAGLE_TESTS,
    ),
    Mutant(
        "draft_service:MaskDrafter._make_blocks",
        drop("truncate"),
        "masks stay in the cache, and what is drafted behind them is wrong",
        PEAGLE_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:target_ids",
        operation("+", "arange", to="_1"),
        "offsets are taken for ids, and other tokens are drafted than were meant",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:Projection.exact",
        never("each"),
        "3.1's norms of the taps are taken for one of all",
        ("tests/unit/outrider/engine/heads/test_projection.py",),
    ),
    Mutant(
        f"{HEADS_ROOM}:HeadNetwork.mapped",
        always("draft_ids"),
        "the self-test sees no difference beside the logits of ids without a row",
        EAGLE3_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.medusa:_count",
        operation("+", "int", to="_0"),
        "heads of several layers are not read",
        MEDUSA_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.dflash:_taps",
        constant(1, to="0", nth=(6, 6)),
        "DFlash heads read the layers before theirs",
        DFLASH_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}.dflash:_facts",
        argument("DFlashConfig", "embedding_scale", to="1.0"),
        "DFlash heads of Gemma embed blocks without the target's scale",
        ("tests/unit/outrider/engine/heads/test_network.py",),
    ),
    Mutant(
        f"{HEADS_ROOM}.dflash:_taps",
        comparison("==", to="False"),
        "DFlash heads that read the target's last state read it before its norm",
        DFLASH_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:BlockHead.read",
        call("k_norm", to="_0"),
        "keys of features are not normed, and DFlash drafts worse",
        DFLASH_TESTS,
    ),
    Mutant(
        f"{HEADS_ROOM}:BlockHead.run",
        argument("fill", 1, to="_ - _.min()"),
        "blocks have the positions of the features",
        DFLASH_TESTS,
    ),
    Mutant(
        "outrider.engine.attention:_seen",
        always("causal", beside=("broadcast_to",)),
        "what is not causal is, where a window makes a mask",
        ("tests/unit/outrider/engine/attention/test_paged_attention.py", *DFLASH_TESTS),
    ),
    Mutant(
        f"{HEADS_ROOM}:BlockHead", constant(0, to="1", nth=(1, 4)), "blocks follow rows that are one off", DRAFTER_TESTS
    ),
    Mutant(
        "draft_service:SequentialDrafter._step",
        subscript("states", to="self._sequential.begin()"),
        "a recurrent head begins its state anew at every place",
        DRAFTER_TESTS,
    ),
)
