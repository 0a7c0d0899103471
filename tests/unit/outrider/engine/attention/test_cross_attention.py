"""Encoder-decoder models at the runner: batches of rows with sources of their own, what is refused, what is freed.

Ragged rounds with rollbacks on every architecture are in test_architectures.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from outrider.engine.kv_pool import OutOfBlocks
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import EncoderSource, Row
from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.settings.config import TargetConfig
from tests.rounds import some_ids
from tests.shrunk import shrunk
from tests.tiny_models import EOS_ID, START_ID, random_model, save, tiny_bart, tiny_t5

VOCAB_SIZE = 97
MADE = {"t5": tiny_t5, "bart": tiny_bart}


def load(folder: str | Path, **changes: Any) -> ModelRunner:
    options: dict[str, Any] = {"device": "cpu", "kv_cache_tokens": 1024, "max_slots": 8}
    return load_runner(TargetConfig(model=str(folder), **{**options, **changes}))


@pytest.fixture(scope="module", params=sorted(MADE))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return MADE[request.param](tmp_path_factory.mktemp(request.param), VOCAB_SIZE)


@pytest.fixture(scope="module")
def runner(folder: str) -> ModelRunner:
    return load(folder)


@cache
def model_of(folder: str) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(folder: str, source_ids: list[int], max_tokens: int) -> list[int]:
    """What transformers' own loop writes, greedily, with what it begins with."""
    ids = torch.tensor([source_ids])
    made = model_of(folder).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, max_new_tokens=max_tokens
    )
    return made[0].tolist()


class Answer:
    """An answer that is written a token at a time."""

    def __init__(self, runner: ModelRunner, source_ids: list[int]) -> None:
        self.table, self.source = runner.pool.new_table(), EncoderSource(runner.pool.new_table(), source_ids)
        self.ids, self.num_cached = list(runner.facts.decoder_start_ids), 0

    def encode(self) -> Row:
        return Row(self.table, (), 0, 0, (), source=self.source)

    def row(self) -> Row:
        return Row.of(self.table, self.ids, self.num_cached, 1, self.source)

    def free(self) -> None:
        self.table.free()
        self.source.table.free()


def test_answers_that_join_and_leave_a_batch_are_those_of_generate(runner: ModelRunner, folder: str) -> None:
    sources = [some_ids(count, VOCAB_SIZE, count) for count in (1, 40, 16, 17, 5)]
    expected = [generated(folder, source, 20) for source in sources]
    assert len({tuple(ids) for ids in expected}) == len(sources)
    waiting, running, written = [Answer(runner, source) for source in sources], list[Answer](), dict[int, list[int]]()
    while waiting or running:
        rows, joining = [answer.row() for answer in running], waiting[:2]
        del waiting[:2]
        logits = runner.forward([*(answer.encode() for answer in joining), *rows])  # [B, V], nothing of those
        for answer, row, last in zip(running, rows, logits, strict=True):
            answer.num_cached = row.num_tokens
            answer.ids.append(int(last.argmax()))
        running += joining
        for answer in [each for each in running if len(each.ids) > 20 or each.ids[-1] == EOS_ID]:
            written[sources.index(list(answer.source.ids))] = answer.ids
            answer.free()
            running.remove(answer)
    assert [written[index] for index in range(len(sources))] == expected
    assert runner.pool.num_in_use == 0


def test_facts(runner: ModelRunner, folder: str) -> None:
    facts, is_bart = runner.facts, "bart" in folder
    assert (runner.path.name, facts.num_layers, facts.vocab_size) == ("dense", 2, VOCAB_SIZE)
    assert facts.decoder_start_ids == ((START_ID, START_ID + 1) if is_bart else (START_ID,))
    assert facts.context_limit == (128 if is_bart else 2048)
    assert runner.supports_trees
    assert runner.features_refusal == "heads are of decoder-only models"


def test_nothing_stale_is_read(runner: ModelRunner) -> None:
    """NaN in every block that nobody owns: a padding column that read one would spread it."""
    long, short = Answer(runner, some_ids(33, VOCAB_SIZE, 1)), Answer(runner, some_ids(2, VOCAB_SIZE, 2))
    runner.forward([long.encode(), short.encode()])
    before = [runner.forward([answer.row()]) for answer in (long, short)]
    held = {0}.union(*(table.blocks for each in (long, short) for table in (each.table, each.source.table)))
    with torch.inference_mode():  # the storage was made in it
        path: Any = runner.path
        for layer in path._cache.layers:
            for block in set(range(runner.pool.num_blocks + 1)) - held:
                layer.keys[block], layer.values[block] = torch.nan, torch.nan
    for answer in (long, short):
        answer.table.truncate(0)
    after = runner.forward([long.row(), short.row()])
    assert (torch.cat(before) - after).abs().max() < 1e-5
    for answer in (long, short):
        answer.free()


def test_a_forward_that_fails_leaves_no_source_behind(runner: ModelRunner) -> None:
    bad, good = Answer(runner, [5, VOCAB_SIZE]), Answer(runner, [5, 6])
    with pytest.raises(InvalidRequest, match=f"token id {VOCAB_SIZE} is outside the vocabulary"):
        runner.forward([good.encode(), bad.encode()])
    with pytest.raises(InvalidRequest, match="a source of 0 tokens, must have 1 to"):
        runner.forward([Answer(runner, []).encode()])
    hog = runner.pool.new_table()
    hog.reserve((runner.pool.num_blocks - 2) * runner.pool.block_size)
    with pytest.raises(OutOfBlocks):
        runner.forward([Answer(runner, some_ids(33, VOCAB_SIZE, 3)).encode()])
    hog.free()
    assert runner.pool.num_in_use == 0 and not good.source.table.blocks
    runner.forward([good.encode()])
    assert runner.forward([good.row()]).isfinite().all()
    good.free()


def test_a_source_of_nan_spoils_no_other(runner: ModelRunner) -> None:
    """Not even where the encoder runs over both at once, and by nothing that is left in the cache."""
    good, bad = (Answer(runner, some_ids(size, VOCAB_SIZE, size)) for size in (9, 12))
    runner.forward([good.encode()])
    before = runner.forward([good.row()])
    good.free()

    def poison(module: Any, args: Any, output: Any) -> None:
        output[0][1] = torch.nan

    path: Any = runner.path
    hook = path._across._encoder.register_forward_hook(poison)
    runner.forward([good.encode(), bad.encode()])
    hook.remove()
    after = runner.forward([good.row(), bad.row()])
    assert (after[:1] - before).abs().max() < 1e-5 and after[1].isnan().all()
    good.free()
    bad.free()


def test_half_precision_and_int8_pass_the_self_test(folder: str) -> None:
    assert load(folder, dtype="bfloat16").facts.dtype == "bfloat16"
    assert load(folder, quantization="int8").facts.quantization == "int8"


def test_a_class_whose_own_cache_takes_one_token_at_a_time_is_refused_for_that(tmp_path: Path) -> None:
    save(random_model(shrunk("prophetnet"), seed=0), tmp_path)
    with pytest.raises(ConfigError, match="its cache takes no several tokens at once behind others; use another model"):
        load(tmp_path, context_limit=64)


def test_settings_that_do_not_go_with_an_encoder_are_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="paged: runs decoder-only models alone"):
        load(folder, attention_path="paged")
    with pytest.raises(ConfigError, match=r"lookahead_embeddings is .* has no table that rows can be appended to"):
        load(folder, lookahead_embeddings=str(tmp_path))
    with pytest.raises(ConfigError, match="is an encoder-decoder model, which is not split"):
        load_runner(TargetConfig(model=folder, device="cpu", tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"kv_cache_tokens is 16.* takes two at least: set it to 32"):
        load(folder, kv_cache_tokens=16)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in ("config.json", "generation_config.json"):
        named = json.loads((copy / name).read_text())
        named.pop("decoder_start_token_id", None)
        (copy / name).write_text(json.dumps(named))
    if "bart" not in folder:  # BART's configuration has one by itself
        with pytest.raises(ConfigError, match="names a decoder_start_token_id"):
            load(copy)
