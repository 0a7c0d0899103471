"""Draft heads: what is read of their files, and the forward. A fault drafts fluently and is accepted less."""

from tests.mutants import Mutant

HEAD, FILES = "outrider/engine/heads/eagle3.py", "outrider/engine/heads/eagle3_files.py"
CARRY, NETWORK = "outrider/engine/heads/carry_head.py", "outrider/engine/heads/head_network.py"
MAPS, OPENING = "outrider/engine/heads/maps.py", "outrider/engine/heads/opening.py"
MEDUSA_FILES = "outrider/engine/heads/medusa_files.py"
JOINED, JOINED_FILES = "outrider/engine/heads/joined.py", "outrider/engine/heads/joined_files.py"
JOINED_TESTS, PEAGLE_TESTS = ("tests/engine/test_joined.py",), ("tests/engine/test_peagle.py",)
EAGLE3_TESTS, MEDUSA_TESTS = ("tests/engine/test_eagle3.py",), ("tests/engine/test_medusa.py",)
DFLASH, DFLASH_FILES = "outrider/engine/heads/dflash.py", "outrider/engine/heads/dflash_files.py"
DFLASH_TESTS, DRAFTER_TESTS = ("tests/engine/test_dflash.py",), ("tests/engine/test_dflash_drafter.py",)

HEADS = (
    Mutant(
        FILES,
        'f"eagle_config.{key}": layer_ids(files, nested.get(key), 1)',
        'f"eagle_config.{key}": layer_ids(files, nested.get(key), 0)',
        "SpecForge's heads read the layers before theirs",
        EAGLE3_TESTS,
    ),
    Mutant(
        FILES,
        "        key: layer_ids(files, files.config.get(key), 0),",
        "        key: layer_ids(files, files.config.get(key), 1),",
        "speculators' heads read the layers behind theirs",
        EAGLE3_TESTS,
    ),
    Mutant(
        FILES,
        "(2, num_layers // 2, num_layers - 3)",
        "(2, num_layers // 2, num_layers - 2)",
        "original heads read another layer than they were trained on",
        EAGLE3_TESTS,
    ),
    Mutant(
        FILES,
        "        return bool(says), True, False",
        "        return False, says is not False, False",
        "speculators' norm_output is taken for SpecForge's, and 3.1 drafts worse from the second token on",
        EAGLE3_TESTS,
    ),
    Mutant(
        HEAD,
        "torch.cat([self.input_layernorm(embedded), normed], dim=-1)",
        "torch.cat([normed, self.input_layernorm(embedded)], dim=-1)",
        "feature and embedding are swapped",
        EAGLE3_TESTS,
    ),
    Mutant(
        HEAD,
        "residual = normed if self.norm_before_residual else hidden",
        "residual = hidden",
        "heads whose first residual is normed draft worse",
        EAGLE3_TESTS,
    ),
    Mutant(
        CARRY,
        "carries = normed if self.facts.carries_normed else hidden",
        "carries = hidden",
        "3.1 drafts worse from the second token on",
        EAGLE3_TESTS,
    ),
    Mutant(
        HEAD,
        "return normed if self.facts.reads_normed else hidden",
        "return normed",
        "heads without a last norm draft worse",
        EAGLE3_TESTS,
    ),
    Mutant(
        JOINED,
        "parts = [self.enorm(embedded), self.hnorm(features.to(embedded.dtype))]",
        "parts = [self.hnorm(features.to(embedded.dtype)), self.enorm(embedded)]",
        "feature and embedding of EAGLE-1 and MTP heads are swapped",
        JOINED_TESTS,
    ),
    Mutant(
        JOINED,
        "            self.model.layers[0].input_layernorm = nn.Identity()\n",
        "",
        "EAGLE-1 heads want a norm that they do not have",
        JOINED_TESTS,
    ),
    Mutant(
        JOINED_FILES,
        'undecided = layers.model_type.startswith("glm"), ("carries_normed",)',
        "undecided = False, ()",
        "MTP heads that carry the normed output draft worse from the second token on",
        JOINED_TESTS,
    ),
    Mutant(
        "outrider/engine/heads/peagle_files.py",
        "feature = read.opening.exact(hidden.view(1, taps, target.width))[0]",
        "feature = hidden.flatten()[: read.facts.width]",
        "P-EAGLE heads fill masks that they do not know",
        PEAGLE_TESTS,
    ),
    Mutant(
        "draft_service/block_drafter.py",
        "            slot.truncate(len(slot.committed) + 1)\n",
        "",
        "masks stay in the cache, and what is drafted behind them is wrong",
        PEAGLE_TESTS,
    ),
    Mutant(
        MAPS,
        "torch.arange(len(d2t)) + d2t.to(torch.int64)",
        "d2t.to(torch.int64)",
        "offsets are taken for ids, and other tokens are drafted than were meant",
        EAGLE3_TESTS,
    ),
    Mutant(
        OPENING,
        'if self.norm is not None and self.spec.norm == "each":',
        'if self.norm is not None and self.spec.norm == "every":',
        "3.1's norms of the taps are left out",
        ("tests/engine/test_opening.py",),
    ),
    Mutant(
        NETWORK,
        "return logits if self.draft_ids is None else logits.index_select(-1, self.draft_ids)",
        "return logits",
        "the self-test sees no difference beside the logits of ids without a row",
        EAGLE3_TESTS,
    ),
    Mutant(
        MEDUSA_FILES,
        "renamed[_own_name(short, last)] = files.tensor(name)",
        "renamed[_own_name(short, 1)] = files.tensor(name)",
        "heads of several layers are not read",
        MEDUSA_TESTS,
    ),
    Mutant(
        DFLASH_FILES,
        'keys.get("target_layer_ids", "dspark_target_layer_ids"), 1)',
        'keys.get("target_layer_ids", "dspark_target_layer_ids"), 0)',
        "DFlash heads read the layers before theirs",
        DFLASH_TESTS,
    ),
    Mutant(
        DFLASH_FILES,
        "embedding_scale=target.embedding_scale if goes_through_module else 1.0",
        "embedding_scale=1.0",
        "DFlash heads of Gemma embed blocks without the target's scale",
        ("tests/engine/test_borrowed_embedding.py",),
    ),
    Mutant(
        DFLASH_FILES,
        "NORMED if tap == num_layers else tap",
        "tap",
        "DFlash heads that read the target's last state read it before its norm",
        DFLASH_TESTS,
    ),
    Mutant(
        DFLASH,
        "self.self_attn(self.input_layernorm(hidden), rows, rotary, cache)",
        "self.self_attn(self.input_layernorm(hidden), self.input_layernorm(rows), rotary, cache)",
        "each layer norms the rows, and DFlash drafts worse",
        DFLASH_TESTS,
    ),
    Mutant(
        "outrider/engine/heads/block_path.py",
        "torch.cat([before.position_ids, plan.position_ids], dim=1)",
        "torch.cat([plan.position_ids, before.position_ids], dim=1)",
        "rows have the positions of the block",
        DFLASH_TESTS,
    ),
    Mutant(
        "outrider/engine/paths/paged_attention.py",
        "last = queries if options.causal else",
        "last = queries if True else",
        "what is not causal is, where a window makes a mask",
        ("tests/engine/test_paged.py", *DFLASH_TESTS),
    ),
    Mutant(
        "draft_service/head_slot.py",
        "    lag: ClassVar[int] = 0",
        "    lag: ClassVar[int] = 1",
        "blocks follow rows that are one off",
        DRAFTER_TESTS,
    ),
    Mutant(
        "draft_service/dflash_drafter.py",
        "parent.kept[0] != block.position",
        "parent.kept[0] > block.position",
        "a recurrent head goes on with a state of another block",
        DRAFTER_TESTS,
    ),
)
