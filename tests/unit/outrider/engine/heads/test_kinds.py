"""Which kind of draft a folder holds, and refusals of the kinds that are not served, by name."""

from pathlib import Path
from typing import Any

import pytest

from outrider.engine.heads import kinds
from outrider.engine.heads.kinds import HeadKind, is_same, kind_of, pard_block
from outrider.wire.errors import ConfigError
from tests.unit.outrider.engine.heads.folders import MODEL, files

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "num_hidden_layers": 1}
EAGLE1 = ("fc.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
EAGLE3 = ("fc.weight", "lm_head.weight", "midlayer.hidden_norm.weight")


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        (LLAMA, MODEL, kinds.MODEL),
        ({**LLAMA, "num_nextn_predict_layers": 1}, MODEL, kinds.MODEL),
        ({**LLAMA, "pard_token": 90}, MODEL, kinds.PARD),
        ({**LLAMA, "ptd_token_id": 90}, MODEL, kinds.PARD),
        (LLAMA, EAGLE3, kinds.EAGLE3),
        (LLAMA, ("fc.weight", "layers.0.hidden_norm.weight"), kinds.EAGLE3),
        ({"speculators_model_type": "eagle3"}, EAGLE3, kinds.EAGLE3),
        (LLAMA, EAGLE1, kinds.EAGLE1),
        ({"speculators_model_type": "mtp"}, ("mtp_layers.0.input_proj.weight",), kinds.MTP),
        ({"speculators_model_type": "peagle"}, EAGLE3, kinds.PEAGLE),
        ({**LLAMA, "architectures": ["PEagleDraftModel"]}, EAGLE3, kinds.PEAGLE),
        (LLAMA, (*EAGLE3, "mask_hidden"), kinds.PEAGLE),
        ({**LLAMA, "pard_token": 3, "parallel_drafting": True}, EAGLE3, kinds.PEAGLE),
        ({"medusa_num_heads": 5}, ("0.0.linear.weight",), kinds.MEDUSA),
        ({"model_type": "medusa"}, ("blocks.0.layers.0.weight",), kinds.MEDUSA),
        ({}, ("medusa_head.0.0.linear.weight",), kinds.MEDUSA),
        ({"architectures": ["DFlashDraftModel"]}, EAGLE1, kinds.DFLASH),
        ({"dflash_config": {"mask_token_id": 3}}, EAGLE1, kinds.DFLASH),
        ({"speculators_model_type": "dflash", "projector_type": "dflash"}, EAGLE1, kinds.DFLASH),
        ({"dflash_config": {"mask_token_id": 3}, "parallel_drafting": True}, EAGLE1, kinds.DFLASH),
        ({"dflash_config": {"projector_type": "dspark"}}, EAGLE1, kinds.DSPARK),
        ({"architectures": ["Qwen3DSparkModel"]}, EAGLE1, kinds.DSPARK),
        ({"speculators_model_type": "dspark"}, EAGLE1, kinds.DSPARK),
    ],
)
def test_kinds_that_are_served(config: dict[str, Any], names: tuple[str, ...], kind: HeadKind, tmp_path: Path) -> None:
    assert kind_of(files(tmp_path, config, names)) is kind


@pytest.mark.parametrize(
    ("config", "names", "words"),
    [
        ({"speculators_model_type": "dflash2"}, EAGLE1, "speculators model of another type, 'dflash2'"),
        (
            {"speculators_model_type": "dflash3", "architectures": ["DFlash3Speculator"]},
            EAGLE1,
            "speculators model of another type, 'dflash3'",
        ),
        ({"speculators_model_type": "independent"}, EAGLE3, "speculators model of another type, 'independent'"),
        ({"speculators_model_type": "dflash", "projector_type": "domino"}, EAGLE1, "Domino"),
        ({"architectures": ["DFlash2DraftModel"]}, EAGLE1, "DFlash2"),
        ({"dflash_config": {"projector_type": "domino"}}, EAGLE1, "Domino"),
        ({"hydra_num_heads": 4}, MODEL, "Hydra"),
        ({"model_type": "mlp_speculator"}, MODEL, "MLP speculator"),
        ({"model_type": "gemma4_assistant"}, MODEL, "Gemma 4 assistant"),
        ({"model_type": "qwen3_next_mtp"}, MODEL, "MTP"),
        ({"model_type": "qwen3_next"}, ("mtp.fc.weight",), "MTP"),
        (LLAMA, ("fc.weight",), "unknown kind"),
    ],
)
def test_kinds_that_are_not_served(config: dict[str, Any], names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.* not served; served are EAGLE-3"):
        kind_of(files(tmp_path, config, names))


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        ({"num_nextn_predict_layers": 1}, ("model.layers.1.eh_proj.weight",), kinds.MTP),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, ("mtp.fc.weight",), kinds.MTP),
        ({"num_nextn_predict_layers": 0}, ("model.layers.1.eh_proj.weight",), kinds.MODEL),
    ],
)
def test_a_target_that_drafts_for_itself_is_its_mtp_head(
    config: dict[str, Any], names: tuple[str, ...], kind: HeadKind, tmp_path: Path
) -> None:
    found = files(tmp_path, {**LLAMA, **config}, (*MODEL, *names))
    assert kind_of(found, f"{tmp_path}/.") is kind
    assert kind_of(found, str(tmp_path.parent)) is kind_of(found) is kinds.MODEL


def test_two_names_of_one_file_are_one_model(tmp_path: Path) -> None:
    """As two mounts of one folder are."""
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.touch()
    other.hardlink_to(one)
    assert is_same(str(one), str(other)) and is_same("owner/model", "owner/model")
    assert not is_same(str(one), str(tmp_path)) and not is_same("owner/model", "owner/other")


def test_a_target_that_lost_its_mtp_head_is_no_draft_of_itself(tmp_path: Path) -> None:
    found = files(tmp_path, {**LLAMA, "num_nextn_predict_layers": 1}, MODEL)
    with pytest.raises(ConfigError, match=r"has 1 layers for multi-token prediction and whose files have none; get"):
        kind_of(found, str(tmp_path))


@pytest.mark.parametrize("token", [97, -1, "<mask>"])
def test_a_masked_position_must_be_an_id(token: object, tmp_path: Path) -> None:
    assert pard_block(files(tmp_path, {**LLAMA, "pard_token": 96})).mask_id == 96
    with pytest.raises(ConfigError, match=r"^pard_token of .* must be a whole number from 0 to 96"):
        pard_block(files(tmp_path, {**LLAMA, "pard_token": token}))
