"""Which models can be served and which drafts fit a target, as their files alone say."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import MambaConfig

from tests.forked import REPO
from tests.other_tokenizers import byte_level
from tests.stack import DEMO_DRAFT, DEMO_TARGET, OTHER_DRAFT
from tests.tiny_models import tiny_llama
from tests.unit.outrider.engine.checked import pair


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_attention_heads": "x"}, "expected int, got str (value: 'x')"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"dtype": "none"}, "has no attribute 'none'"),
        ({"architectures": [5]}, "architectures is [5]"),
    ],
)
def test_a_configuration_that_nothing_can_be_made_of_is_the_models_fault(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    for file in Path(DEMO_DRAFT).iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    found = pair(str(tmp_path))
    state, said, _ = found[f"draft {tmp_path}"]
    assert "memory" in found and "\n" not in said
    assert state == "problem" and words in said and str(tmp_path) in said


def test_pairs_that_work_and_how() -> None:
    found = pair(DEMO_DRAFT, OTHER_DRAFT, str(REPO / "models/demo/eagle3"), str(REPO / "models/demo/medusa"))
    assert {state for state, _, _ in found.values()} == {"ok"}
    assert found[f"draft {DEMO_DRAFT}"][1].endswith("; the target's tokens")
    assert "works by translation: 1787 of the smaller vocabulary's 2044 tokens" in found[f"draft {OTHER_DRAFT}"][1]
    assert "a head (eagle3) that fits the target" in found[f"draft {REPO / 'models/demo/eagle3'}"][1]
    assert "LlamaForCausalLM, context 2048, vocabulary 4096, weights 42.0 MiB" in found["target"][1]
    assert "weights 21.0 MiB" in pair(dtype="bfloat16")["target"][1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafts that cannot serve the demo target, by name."""
    root = tmp_path_factory.mktemp("drafts")
    tiny_llama(root / "nothing_shared")
    tokenizer = json.loads(byte_level(300).to_str())
    for entry in ("vocab", "merges"):
        tokenizer["model"][entry] = {"☃": 0} if entry == "vocab" else []
    tokenizer["added_tokens"] = []
    (root / "nothing_shared" / "tokenizer.json").write_text(json.dumps(tokenizer))
    tiny_llama(root / "short", vocab_size=4096, context=64)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (root / "short" / file).write_bytes((Path(DEMO_TARGET) / file).read_bytes())
    tiny_llama(root / "stateful")
    MambaConfig(vocab_size=320, architectures=["MambaForCausalLM"]).save_pretrained(root / "stateful")
    (root / "hydra").mkdir()
    (root / "hydra" / "config.json").write_text('{"hydra_num_heads": 3}')
    (root / "empty").mkdir()
    return root


@pytest.mark.parametrize(
    ("draft", "state", "found"),
    [
        ("nothing_shared", "problem", "use two models of one tokenizer"),
        ("short", "warning", "no drafts past token 64, and answers may have 2048"),
        ("stateful", "problem", "MambaForCausalLM keeps a running state that is not served yet (linear_attention"),
        ("hydra", "problem", "holds Hydra heads, which is not served; served are EAGLE-3"),
        ("empty", "problem", "empty has no config.json"),
    ],
)
def test_drafts_that_cannot_serve_a_target(folders: Path, draft: str, state: str, found: str) -> None:
    name = str(folders / draft)
    said = pair(name)[f"draft {name}"]
    assert said[0] == state and found in said[1]


def test_an_encoder_a_head_of_another_target_and_the_target_itself(
    monkeypatch: pytest.MonkeyPatch, folders: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    translation, head = str(REPO / "models/translation/draft"), str(REPO / "models/demo/eagle3")
    found = pair(translation, DEMO_TARGET)
    assert "does not fit target" in found[f"draft {translation}"][1]
    assert found[f"draft {DEMO_TARGET}"][:2] == ("warning", "the draft is the target itself: nothing gets faster")
    other = pair(head, target=str(folders / "short"))[f"draft {head}"]
    assert other[0] == "problem" and "eagle3" in other[1], other
    state, said, remedy = pair(target="no-such-owner/no-such-model")["target"]
    assert state == "problem" and "is no folder here, the hub's cache has no config.json of it" in said
    assert "outrider pull no-such-owner/" in remedy
    assert pair(DEMO_DRAFT, target=str(folders / "empty")).keys() == {"GPU", "C++ forward", "target", "skipped"}
