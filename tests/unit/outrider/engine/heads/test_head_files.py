"""Files of heads that do not fit are refused by the name of what is wrong with them, whatever the kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import read_dflash
from outrider.engine.heads.eagle3 import read_eagle3, read_peagle
from outrider.engine.heads.joined import read_eagle1, read_mtp
from outrider.engine.heads.medusa import read_medusa
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.heads import test_dspark, test_medusa, test_peagle
from tests.unit.outrider.engine.heads.block_layouts import BlockHead
from tests.unit.outrider.engine.heads.joined_layouts import as_qwen, as_speculators, eagle1, in_target
from tests.unit.outrider.engine.heads.layouts import DRAFT_VOCAB, LAYERS, VOCAB, WIDTH, Eagle3
from tests.unit.outrider.engine.heads.test_dflash import ZLAB
from tests.unit.outrider.engine.heads.test_eagle3 import ORIGINAL

Spoil = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""Changes config.json and the tensors of a head that fits."""
WRITERS: dict[str, Callable[[Path, str], tuple[str, str]]] = {
    "EAGLE-3": lambda folder, target: (Eagle3().write(folder, ORIGINAL), target),
    "P-EAGLE": lambda folder, target: (test_peagle.made().write(folder, test_peagle.VLLM), target),
    "EAGLE-1": lambda folder, target: eagle1(folder, bias=True)[1:],
    "MTP": lambda folder, target: in_target(folder, "glm4_moe")[1:],
    "MTP of Qwen": lambda folder, target: as_qwen(folder)[1:],
    "MTP of speculators": lambda folder, target: as_speculators(folder, "qwen3")[1:],
    "DFlash": lambda folder, target: (BlockHead().write(folder, ZLAB), target),
    "DSpark": lambda folder, target: (
        BlockHead(from_anchor=True, markov="vanilla").write(folder, test_dspark.SPECFORGE),
        target,
    ),
    "Medusa": lambda folder, target: (
        test_medusa.write(folder, test_medusa.VLLM, test_medusa.random_tensors()),
        target,
    ),
}
READERS: dict[str, Callable[[Checkpoint, TargetFiles], object]] = {
    "EAGLE-3": read_eagle3,
    "P-EAGLE": read_peagle,
    "EAGLE-1": read_eagle1,
    "MTP": read_mtp,
    "DFlash": lambda files, target: read_dflash(files, target, is_dspark=False),
    "DSpark": lambda files, target: read_dflash(files, target, is_dspark=True),
    "Medusa": read_medusa,
}


def config(**values: Any) -> Spoil:
    return lambda config, tensors: config.update(values)


def block(**values: Any) -> Spoil:
    return lambda config, tensors: config["dflash_config"].update(values)


def without(*names: str) -> Spoil:
    return lambda config, tensors: [tensors.pop(name) for name in names]


def tensor(name: str, value: Tensor) -> Spoil:
    return lambda config, tensors: tensors.update({name: value})


KEY, AT = "eagle_aux_hidden_state_layer_ids", f"model.layers.{LAYERS}."
REFUSALS: dict[str, list[tuple[Spoil, str]]] = {
    "EAGLE-3": [
        (config(**{KEY: [2, 5]}), r"fc\.weight of .* \[64, 192\], .* must be \[64, 128\]; give the target"),
        (tensor("fc.weight", torch.zeros(64, 128)), r"fc\.weight of .* \[64, 128\], .* must be \[64, 192\]"),
        (config(**{KEY: [2, 5, 9]}), r"\[2, 5, 9\] .* 8 layers"),
        (
            config(**{KEY: [2, 4, 5], "eagle_config": {KEY: [2, 4, 5]}}),
            rf"{KEY} means the hidden states \[2, 4, 5\] and eagle_config\.{KEY} means .* \[3, 5, 6\]",
        ),
        (config(**{KEY: ["2", 4, 5]}), r"layer ids of .* must be a list of whole numbers"),
        (config(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        (config(vocab_size=90), "90 ids .* 97"),
        (config(draft_vocab_size=30), r"lm_head\.weight of .* has 31 rows, and draft_vocab_size is 30; correct its"),
        (config(draft_vocab_size="many"), "draft_vocab_size of .* is 'many'"),
        (tensor("lm_head.weight", torch.ones(DRAFT_VOCAB)), r"lm_head\.weight: .*\[31\].*\[31, 64\]"),
        (
            lambda c, t: t.pop("d2t") is None or t.update(t2d=t["t2d"] & (torch.arange(VOCAB) > 9)),
            "t2d of .* keeps .* 31 rows of its lm_head; correct draft_vocab_size",
        ),
        (tensor("mask_embedding", torch.zeros(1)), "Unexpected key.*mask_embedding"),
        (without("midlayer.mlp.up_proj.weight"), r"Missing key.*layers\.0\.mlp\.up_proj\.weight"),
        (config(fc_norm=True), "fc_norm of .* is True .* missing"),
        (
            lambda c, t: t.update({f"fc_norm.{i}.weight": torch.ones(64) for i in range(2)}),
            r"fc_norm\.2\.weight of .* missing",
        ),
        (lambda c, t: t["lm_head.weight"].fill_(torch.nan), r"lm_head\.weight of .* not finite"),
        (tensor("fc.weight", torch.zeros(64, 192, dtype=torch.int8)), r"fc\.weight of .* is torch\.int8"),
        (config(intermediate_size=80), r"gate_proj\.weight: .*\[96, 64\].*\[80, 64\]"),
        (config(intermediate_size=1 << 60), "does not fit its config.json"),
        (config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (config(num_key_value_heads=3), "cannot read config.json .* num_key_value_heads, 3"),
        (config(model_type="mistral", sliding_window=16), "sliding window"),
        (config(partial_rotary_factor=0.5), "rotary positions"),
    ],
    "P-EAGLE": [
        (without("mask_hidden"), "has no mask_hidden"),
        (tensor("mask_hidden", torch.zeros(1, 1, WIDTH)), r"mask_hidden of .* is \[64\], .* must be \[192\]"),
        (lambda c, t: c.pop("pard_token"), "pard_token or ptd_token_id of .* is None, must be a whole number"),
        (config(pard_token=VOCAB), f"pard_token .* is {VOCAB}"),
    ],
    "EAGLE-1": [
        (without("fc.bias"), r"bias of .* is True, and fc\.bias is missing"),
        (config(bias=False), r"bias of .* is False, and fc\.bias is there"),
        (config(hidden_size=32, head_dim=8), "is 32 wide and .* 64"),
        (tensor("embedding_layernorm.weight", torch.ones(WIDTH)), r"Unexpected key.*embedding_layernorm\.weight"),
    ],
    "MTP": [
        (
            config(num_hidden_layers=LAYERS - 1),
            rf"the MTP head of .* is at model\.layers\.{LAYERS}\.eh_proj\.weight, must be behind the target's 7 layers",
        ),
        (without(AT + "hnorm.weight"), r"Missing key.*hnorm\.weight"),
        (tensor(AT + "gnorm.weight", torch.ones(WIDTH)), r"that its layer does not have: layers\.0\.gnorm\.weight"),
        (without(AT + "mlp.experts.2.up_proj.weight"), r"not all tensors: experts\.2\.up_proj\.weight"),
        (tensor(AT + "self_attn.o_proj.weight", torch.zeros(WIDTH, 7)), r"than by its config\.json: .*o_proj\.weight"),
        (tensor(AT + "eh_proj.weight", torch.zeros(WIDTH, WIDTH)), r"eh_proj\.weight: .*\[64, 64\].*\[64, 128\]"),
    ],
    "MTP of Qwen": [(tensor("mtp.gnorm.weight", torch.ones(WIDTH)), r"that its layer does not have: gnorm\.weight")],
    "MTP of speculators": [(tensor("gnorm.weight", torch.ones(WIDTH)), r"its layer does not have: gnorm\.weight")],
    "DFlash": [
        (block(target_layer_ids=[1, 3, 5]), r"fc\.weight of .* \[64, 128\], .* must be \[64, 192\]"),
        (
            config(aux_hidden_state_layer_ids=[1, 5]),
            r"aux_hidden_state_layer_ids means the hidden states \[1, 5\] and target_layer_ids means .* \[2, 6\]",
        ),
        (config(block_size=None), "block_size of .* is None, must be a whole number from 2 to 65"),
        (config(block_size=1), "block_size of .* is 1"),
        (config(num_target_layers=99), "num_target_layers of .* is 99, and .* has 8 layers"),
        (block(mask_token_id=None), "mask_token_id or dspark_noise_token_id of .* is None, must be a whole number"),
        (without("hidden_norm.weight"), r"hidden_norm\.weight of .* missing"),
        (without("fc.weight"), r"fc\.weight of .* is missing, .* must be \[64, 128\]"),
        (tensor("aux_hidden_norms.0.weight", torch.ones(64)), r"aux_hidden_norms\.0"),
        (block(attention_sink_bias=True), "attention_sink_bias of .* attention sinks"),
        (block(use_swa=True, swa_window_size=8), "use_swa of .* layer_types do not name"),
        (block(output_multiplier=2.0), "output_multiplier of .* is 2.0, .* scaled logits"),
        (config(model_type="llama4_text"), "cannot read config.json|chunk|sliding window"),
    ],
    "DSpark": [
        (block(markov_head_type="lstm"), "markov_head_type of .* is 'lstm', must be one of vanilla"),
        (block(markov_rank=4), r"markov_w1\.weight: .*\[97, 6\].*\[97, 4\]"),
        (block(markov_rank=1 << 30), "markov_rank of .* from 0 to 65536"),
        (block(markov_head_type="gated"), r"Missing key.*markov_head\.gate_proj\.bias"),
        (block(markov_rank=0), r"Unexpected key.*markov_head\.markov_w1\.weight"),
    ],
    "Medusa": [
        (lambda c, t: [t.pop(name) for name in list(t) if ".1." in name[:10]], "Missing key"),
        (without("lm_heads.2.weight"), r"Missing key.*lm_heads\.2\.weight"),
        (
            tensor("blocks.0.layers.0.weight", torch.ones(WIDTH, 2 * WIDTH)),
            r"blocks\.0\.layers\.0\.weight: .*\[64, 128\].*\[64, 64\]",
        ),
        (
            tensor("lm_heads.0.weight", torch.ones(40, WIDTH)),
            r"lm_heads\.0\.weight: .*\[40, .*\[97, .* give the target",
        ),
        (tensor("token_map", torch.arange(70, 70 + VOCAB)), "leads to the id 97"),
        (tensor("blocks.x.weight", torch.ones(2)), "Unexpected key.*blocks.x"),
        (tensor("lm_heads.0.weight", torch.tensor(1.0)), r"lm_heads\.0\.weight: .*\[1\]"),
        (lambda c, t: t.clear() or t.update(other=torch.ones(1)), "no tensors of Medusa heads"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [(kind, *refusal) for kind, refusals in REFUSALS.items() for refusal in refusals],
    ids=[f"{kind} {number}" for kind, refusals in REFUSALS.items() for number in range(len(refusals))],
)
def test_files_that_do_not_fit_are_refused_by_name(
    kind: str, spoil: Spoil, message: str, target_folder: str, tmp_path: Path
) -> None:
    folder, target = WRITERS[kind](tmp_path, target_folder)
    path, weights = Path(folder, "config.json"), Path(folder, "model.safetensors")
    written, tensors = json.loads(path.read_text()), load_file(weights)
    spoil(written, tensors)
    path.write_text(json.dumps(written))
    save_file(tensors, weights)
    with pytest.raises(ConfigError, match=message):
        READERS[kind.split(" of ")[0]](Checkpoint(folder), TargetFiles(target))


def test_an_embedding_of_the_mask_in_a_file_of_its_own_is_refused(target_folder: str, tmp_path: Path) -> None:
    folder = BlockHead().write(tmp_path, ZLAB)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt"):
        read_dflash(Checkpoint(folder), TargetFiles(target_folder), is_dspark=False)
