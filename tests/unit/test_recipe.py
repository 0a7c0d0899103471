"""The demo pair's recipe: corpus, tokenizer, training and distillation, end to end on a tiny corpus."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.recipe import prepare, prompts, train
from models.recipe.pair import SIZES, load_model, new_model, read_ids, sample_windows

NUM_FILES = 150


def source_text(number: int) -> str:
    body = "\n".join(f"    total += values[{number} + {row}]" for row in range(12))
    return f'"""Module {number}."""\n\ndef add_{number}(values):\n    total = 0\n{body}\n    return total\n'


@pytest.fixture(scope="module")
def small_pair() -> Iterator[None]:
    """The recipe is the same at any size."""
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        for which in SIZES:
            patch.setitem(SIZES, which, SIZES[which] | sizes)
        yield


@pytest.fixture(scope="module")
def work(small_pair: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a target and a draft trained for a few steps."""
    root = tmp_path_factory.mktemp("recipe")
    sources, docs, folder = root / "lib", root / "doc", root / "work"
    (sources / "package").mkdir(parents=True)
    docs.mkdir()
    for number in range(NUM_FILES):
        place = docs / f"{number}.rst.txt" if number % 5 == 0 else sources / "package" / f"m{number}.py"
        place.write_text(source_text(number))
    prepare.main([str(folder), "--stdlib", str(sources), "--docs", str(docs), "--vocab-size", "300"])
    short = ["--batch-size", "4", "--window", "32", "--report-every", "10"]
    train.main([str(folder), "target", "--steps", "20", *short])
    train.main([str(folder), "draft", "--steps", "60", *short])
    return folder


def test_held_out_files_stay_out_of_training(work: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    held_out = json.loads((work / "val_files.json").read_text())
    files = [(tokenizer.decode(read_ids(work / f"{part}.bin"))).split("<|endoftext|>")[1:] for part in ("train", "val")]
    assert len(held_out) == len(files[1]) > 0
    assert sorted(files[0] + files[1]) == sorted(source_text(number) for number in range(NUM_FILES))
    assert not set(files[0]) & set(files[1])


def test_a_file_is_read_once_and_broken_or_short_ones_never(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source_text(1))
    (tmp_path / "b.py").write_text(source_text(1))
    (tmp_path / "broken.py").write_bytes(b"\xff" * 500)
    (tmp_path / "short.py").write_text("pass\n")
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "table.py").write_text(source_text(2))
    assert [doc.name for doc in prepare.documents("stdlib", tmp_path, "*.py", set())] == ["stdlib/a.py"]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_training_beats_a_uniform_guess(work: Path, which: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / which)
    assert model.dtype == torch.bfloat16
    ids = sample_windows(read_ids(work / "val.bin"), 16, 32, np.random.default_rng(0))
    with torch.inference_mode():
        loss = train.next_token_loss(model(input_ids=ids).logits.float(), ids).item()
    assert loss < math.log(model.config.vocab_size) - 0.5


def test_losses_by_hand() -> None:
    ids = torch.tensor([[2, 0, 1]])
    sure = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2]]), 3) * 50.0  # [1, 3, 3], sure of each next token
    assert train.next_token_loss(sure, ids).item() == pytest.approx(0.0, abs=1e-6)
    logits, teacher = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[math.log(3), 0.0]]])
    assert train.distillation_loss(logits, teacher).item() == pytest.approx(math.log(2))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert train.distillation_loss(teacher, teacher).item() == pytest.approx(entropy)
    assert train.distillation_loss(teacher, logits).item() == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)


def test_distillation_raises_acceptance(work: Path) -> None:
    target, draft = (load_model(work / which, torch.float32, "cpu") for which in ("target", "draft"))
    torch.manual_seed(1)
    untrained = new_model("draft", target.config.vocab_size).eval()
    ids = sample_windows(read_ids(work / "val.bin"), 8, 16, np.random.default_rng(3))
    with torch.inference_mode():
        own, *guesses = (model(ids).logits[:, 3:-1].softmax(dim=-1) for model in (target, draft, untrained))
    distilled, random = (float(torch.minimum(own, guess).sum(dim=-1).mean()) for guess in guesses)
    assert distilled > random + 0.05


def test_another_tokenizer_and_a_draft_of_its_own(work: Path, tmp_path: Path) -> None:
    """Learnt from the documentation, digits and underscores alone, and trained on what the target wrote as well."""
    target = tmp_path / "target"
    load_model(work / "target", torch.float32, "cpu").save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    tokenizer.save_pretrained(target)
    said = "def written_by_the_target(values): return 12345\n" * 6
    answer = np.array(tokenizer.encode(said), dtype=np.int32)
    facts = {"lengths": np.array([len(answer)]), "starts": np.array([2]), "temperatures": np.array([0.0])}
    np.savez(tmp_path / "00000.npz", ids=answer, **facts)
    folder, sources = tmp_path / "other", work.parent
    where = ["--stdlib", str(sources / "lib"), "--docs", str(sources / "doc"), "--vocab-size", "290"]
    prepare.main([str(folder), *where, "--other", "--written", str(tmp_path), "--target", str(target)])
    other = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert said in other.decode(read_ids(folder / "train.bin"))
    pieces = other.convert_ids_to_tokens(other.encode("total_of 1234"))
    assert {"1", "2", "3", "4", "_"} <= set(pieces)
    short = ["--batch-size", "4", "--window", "32", "--report-every", "10"]
    train.main([str(folder), "draft", "--steps", "20", "--alone", *short])
    ids = sample_windows(read_ids(folder / "val.bin"), 16, 32, np.random.default_rng(0))
    draft = load_model(folder / "draft", torch.float32, "cpu")
    with torch.inference_mode():
        loss = train.next_token_loss(draft(input_ids=ids).logits.float(), ids).item()
    assert loss < math.log(draft.config.vocab_size) - 0.5


def test_prompts_are_cut_from_training_files(work: Path) -> None:
    prompts.main([str(work), "--count", "20"])
    texts = [json.loads(line)["prompt"] for line in (work / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    files = tokenizer.decode(read_ids(work / "train.bin")).split("<|endoftext|>")
    assert len(set(texts)) == 20 and all(any(text in file for file in files) for text in texts)
    assert all(len(tokenizer.encode(text)) >= prompts.LENGTHS[0] for text in texts)
