"""EAGLE-3 heads in every layout, against the forward written straight down; each fault of a reader changes the logits.

Everything runs in float64 and ends in float32, hence the tolerance.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.engine.errors import PathUnavailable
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.head_loader import load_head
from outrider.engine.heads.head_path import FusedHeadPath, HeadPath
from outrider.engine.heads.kinds import EAGLE3, kind_of
from outrider.engine.heads.network import UNMAPPED, CarryHead
from outrider.engine.kv_pool import KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner
from outrider.engine.native.library import NativeModel
from outrider.engine.step_plan import Row
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig
from tests.native import skip_without_library
from tests.unit.outrider.engine.heads.joined_layouts import Joined
from tests.unit.outrider.engine.heads.layouts import DRAFT_VOCAB, SHAPE, VOCAB, WIDTH, Eagle3, hidden_states, target

TOLERANCE = 1e-6
"""Largest difference, as a share of the largest logit."""
CLEAR = 1e-2
"""Least difference that a planted fault makes."""
BASE = {**SHAPE, "model_type": "llama", "num_hidden_layers": 1}
ORIGINAL = {**BASE, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
SPECFORGE = {**BASE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
DRAFTS = [32, 38, 46, 26]
PARENTS = (-1, 0, 0, 1, 2)
"""Of the tree that follows the prompt; its nodes' ids are DRAFTS and 43."""
PATHS = ((0, 1, 3), (0, 2, 4))


def wrapped(layer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": {**BASE, **layer},
        **more,
    }


@dataclass(frozen=True)
class Case:
    """A head and the files that say it."""

    head: dict[str, Any]
    config: dict[str, Any]
    midlayer: bool = True
    pickled: bool = False
    undecided: tuple[str, ...] = ()


CASES = {
    "original, pickled": Case({}, ORIGINAL, pickled=True),
    "original, all ids": Case({"draft_vocab": VOCAB}, {**ORIGINAL, "draft_vocab_size": VOCAB}),
    "SpecForge": Case(
        {"taps": (1, 3, 7), "leaves_out": ("embed_tokens.weight",), "theta": 5e5},
        {**SPECFORGE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}, "rope_theta": 5e5},
    ),
    "SpecForge 3.1": Case(
        {"projection_norm": "each", "leaves_out": ("embed_tokens.weight",)},
        {**SPECFORGE, "fc_norm": True, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
        undecided=("is_carry_normed",),
    ),
    "SpecForge, projection not normed": Case({"head_normed": False}, {**SPECFORGE, "norm_output": False}),
    "norm of all taps": Case({"projection_norm": "all"}, {**SPECFORGE, "norm_before_fc": True}),
    "speculators": Case(
        {"taps": (1, 4, 6), "residual_normed": True, "qk_norms": True, "num_layers": 2}
        | {"leaves_out": ("embed_tokens.weight", "lm_head.weight")},
        wrapped(
            {"model_type": "qwen3", "num_hidden_layers": 2},
            norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=[1, 4, 6],
        ),
        midlayer=False,
    ),
    "speculators 3.1": Case(
        {"carry_normed": True, "projection_norm": "each"},
        wrapped({}, norm_output=True, fc_norm=True),
        midlayer=False,
        undecided=("norm_before_residual",),
    ),
    "DeepSpec": Case(
        {"taps": (0, 4, 8), "qk_norms": True, "draft_vocab": VOCAB},
        {**BASE, "model_type": "qwen3", "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [-1, 3, 7]},
        midlayer=False,
    ),
}


def made(case: Case, target_folder: str) -> Eagle3:
    head = Eagle3(**case.head)
    head.adopt(load_file(Path(target_folder) / "model.safetensors"))
    return head


def read(case: Case, target_folder: str, folder: Path) -> HeadFiles:
    where = made(case, target_folder).write(folder, case.config, midlayer=case.midlayer, pickled=case.pickled)
    files = Checkpoint(where, allow_pickle=True)
    assert kind_of(files) is EAGLE3
    return read_eagle3(files, TargetFiles(target_folder))


class Served:
    """What was read, run as the product does: features by the projection, the head on the paged path, in float64.

    dtype: another one, of the fused path.
    """

    def __init__(
        self, files: HeadFiles, dtype: torch.dtype | None = None, head_class: type[CarryHead] = Eagle3Head
    ) -> None:
        wanted = dtype or torch.float64
        tensors = {name: t.to(wanted) if t.is_floating_point() else t for name, t in files.tensors.items()}
        self.head = head_class.of(files.facts, tensors)
        self.projection = files.projection.double()
        facts = ModelFacts("head", VOCAB, 128, str(wanted).removeprefix("torch."), "cpu", (), 0)
        self.path = HeadPath(self.head) if dtype is None else FusedHeadPath(self.head, facts)
        self.runner = ModelRunner(self.path, facts, KVPool(16, self.path.block_size), torch.device("cpu"))
        self.runner.tree_refusal = None
        width = getattr(files.facts, "target_width", files.facts.width)
        taps = [
            hidden_states(len(PROMPT), width)[tap] for tap in getattr(files.facts, "taps", files.projection.spec.taps)
        ]
        self.rows = self.projection.exact(torch.stack(taps, dim=1))  # [T, d]

    def prefill(self) -> list[Tensor]:
        """In two pieces and a step: the logits of the last three entries."""
        table, num = self.runner.pool.new_table(), len(PROMPT)
        self.runner.forward([Row(table, PROMPT[:3], 0, 0, PROMPT, features=self.rows[:3])])
        logits = [self.runner.forward([Row(table, PROMPT[3:-1], 3, 2, PROMPT, features=self.rows[3:-1])])]
        logits.append(self.runner.forward([Row(table, PROMPT[-1:], num - 1, 1, PROMPT, features=self.rows[-1:])]))
        self.table, self.carry = table, self.path.hidden
        return logits

    def carried(self) -> list[Tensor]:
        """After `prefill`: each draft with the carry of the entry before it."""
        logits, carry, ids = [], self.carry, list(PROMPT)
        for draft in DRAFTS:
            logits.append(self.runner.forward([Row(self.table, [draft], len(ids), 1, ids, features=carry)]))
            ids, carry = [*ids, draft], self.path.hidden
        self.table.truncate(len(PROMPT))
        return logits

    def tree(self) -> Tensor:
        """After `prefill`: the logits [5, V] of the tree's nodes, fed level by level beside a chain of another row."""
        nodes, num = [*DRAFTS, 43], len(PROMPT)
        other = self.runner.pool.new_table()
        chain = Row(other, PROMPT[:4], 0, 1, PROMPT, features=self.rows[:4])
        logits, carries = [], self.carry
        for first, end in ((0, 1), (1, 3), (3, 5)):
            before = torch.cat([self.carry, carries]) if first else self.carry
            features = before[[parent + 1 for parent in PARENTS[first:end]]]
            cached = [*PROMPT, *nodes[:first]]
            row = Row(self.table, nodes[first:end], num + first, end - first, cached, PARENTS[:end], features)
            logits.append(self.runner.forward([chain, row] if first == 1 else [row])[-(end - first) :])
            found = self.path.hidden[-(end - first) :]
            carries = torch.cat([carries, found]) if first else found
        return torch.cat(logits)

    def all_logits(self) -> Tensor:
        """[12, V]: prefill, the carried steps, and the tree."""
        return torch.cat([*self.prefill(), *self.carried(), self.tree()])


def expected(head: Eagle3 | Joined) -> Tensor:
    """As `Served.all_logits`, [12, V], UNMAPPED where the head has no row."""
    rows, nodes = head.rows(hidden_states(len(PROMPT), head.target_width)), [*DRAFTS, 43]
    parts = [head.forward(rows, PROMPT)[0][-3:], head.carried(rows, [*PROMPT, *DRAFTS])[0][-4:]]
    by_node: dict[int, Tensor] = {}
    for path in PATHS:
        logits = head.carried(rows, [*PROMPT, *(nodes[node] for node in path)])[0][-3:]
        by_node.update(zip(path, logits, strict=True))
    parts.append(torch.stack([by_node[node] for node in sorted(by_node)]))
    mapped = torch.cat(parts)
    return torch.full((len(mapped), VOCAB), UNMAPPED, dtype=torch.float64).index_copy_(1, head.ids, mapped)


def difference(logits: Tensor, truth: Tensor) -> float:
    """The largest, as a share of the largest logit; a row that only one of them has counts as all of it."""
    has = truth > UNMAPPED / 2
    if not torch.equal(logits > UNMAPPED / 2, has):
        return 1.0
    return float((logits - truth)[has].abs().max() / truth[has].abs().max())


@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_what_its_layout_defines(name: str, target_folder: str, tmp_path: Path) -> None:
    case = CASES[name]
    files = read(case, target_folder, tmp_path)
    assert files.undecided == case.undecided
    served = Served(files)
    assert difference(served.all_logits(), expected(made(case, target_folder))) < TOLERANCE


def test_decide_changes_what_a_file_leaves_open(target_folder: str, tmp_path: Path) -> None:
    files = read(CASES["speculators 3.1"], target_folder, tmp_path)
    head = Eagle3(**CASES["speculators 3.1"].head, residual_normed=True)
    served = Served(files)
    served.head.facts = replace(files.facts, norm_before_residual=True)
    assert difference(served.all_logits(), expected(head)) < TOLERANCE


def test_rows_of_padding_are_cut(target_folder: str, tmp_path: Path) -> None:
    """A head that was trained with more ids than the target has keeps none of those."""
    head = Eagle3(draft_vocab=VOCAB)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        head.tensors[name] = torch.cat([head.tensors[name], torch.randn(7, WIDTH)])
    folder = head.write(tmp_path, {**ORIGINAL, "vocab_size": VOCAB + 7, "draft_vocab_size": VOCAB + 7})
    files = read_eagle3(Checkpoint(folder), TargetFiles(target_folder))
    assert difference(Served(files).all_logits(), expected(Eagle3(draft_vocab=VOCAB))) < TOLERANCE


def test_a_head_may_be_narrower_than_its_target_if_it_has_all_tensors(tmp_path: Path) -> None:
    wide = target(tmp_path / "wide", hidden_size=2 * WIDTH)
    head = Eagle3(target_width=2 * WIDTH, projection_norm="each")
    files = read_eagle3(Checkpoint(head.write(tmp_path / "whole", ORIGINAL)), TargetFiles(wide))
    assert difference(Served(files).all_logits(), expected(head)) < TOLERANCE
    head.leaves_out = ("embed_tokens.weight",)
    with pytest.raises(ConfigError, match=r"no embed_tokens\.weight, and the target's .* 128 wide and the head 64"):
        read_eagle3(Checkpoint(head.write(tmp_path / "part", ORIGINAL)), TargetFiles(wide))


def test_a_tied_target_lends_its_embedding_as_projection(tmp_path: Path) -> None:
    folder = target(tmp_path / "tied", tie_word_embeddings=True)
    head = Eagle3(leaves_out=("embed_tokens.weight", "lm_head.weight"))
    files = read_eagle3(Checkpoint(head.write(tmp_path / "head", ORIGINAL)), TargetFiles(folder))
    embedding = load_file(Path(folder) / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(files.tensors["embed_tokens.weight"], embedding)
    assert torch.equal(files.tensors["lm_head.weight"], embedding[head.ids])


def test_a_target_in_parts_is_read_by_its_index(target_folder: str, tmp_path: Path) -> None:
    whole = load_file(Path(target_folder) / "model.safetensors")
    tmp_path.joinpath("config.json").write_text(Path(target_folder, "config.json").read_text())
    parts = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(whole)}
    for part in set(parts.values()):
        save_file({name: whole[name] for name in whole if parts[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    files = TargetFiles(str(tmp_path))
    assert torch.equal(files.embedding(), whole["model.embed_tokens.weight"])
    assert torch.equal(files.lm_head(), whole["lm_head.weight"])


def test_a_pickle_is_read_only_when_it_is_allowed(target_folder: str, tmp_path: Path) -> None:
    folder = Eagle3().write(tmp_path, ORIGINAL, pickled=True)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle.*allow_pickle"):
        kind_of(Checkpoint(folder))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin holds something else than tensors by name"):
        read_eagle3(Checkpoint(folder, allow_pickle=True), TargetFiles(target_folder))


# The fused path.


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CASES), ("speculators", torch.bfloat16), ("speculators 3.1", torch.bfloat16)],
)
def test_the_fused_path_runs_what_the_modules_run(
    name: str, dtype: torch.dtype, target_folder: str, tmp_path: Path
) -> None:
    skip_without_library()
    files = read(CASES[name], target_folder, tmp_path)
    if not files.facts.is_lm_head_normed:
        with pytest.raises(PathUnavailable, match="reads the normed output"):
            Served(files, dtype)
        return
    served = Served(files, dtype)
    head = made(CASES[name], target_folder)
    assert difference(served.all_logits(), expected(head)) < (1e-5 if dtype == torch.float32 else 8e-2)
    assert served.path.hidden.dtype == dtype


def test_the_fused_path_follows_what_is_decided_or_swapped(target_folder: str, tmp_path: Path) -> None:
    """The loader tries other facts and swapped norms on the head that it has, and goes on with one of them."""
    skip_without_library()
    files = read(CASES["original, all ids"], target_folder, tmp_path)
    fused, modules = Served(files, torch.float32), Served(files)
    found = [fused.all_logits()]
    for changes in ({"is_carry_normed": True}, {"norm_before_residual": True}, {}):
        for served in (fused, modules):
            served.head.facts = replace(files.facts, **changes)
        found.append(fused.all_logits())
        assert difference(found[-1], modules.all_logits()) < 1e-5
    for served in (fused, modules):
        served.head.facts = replace(files.facts, has_swapped_norms=True)
    found.append(fused.all_logits())
    assert difference(found[-1], modules.all_logits()) < 1e-5
    assert torch.equal(found[0], found[3])
    assert all(difference(found[0], found[i]) > CLEAR for i in (1, 2, 4))


def test_fused_heads_have_the_same_bits_however_rows_are_cut(
    target_folder: str, tmp_path: Path, set_threads: Callable[[int], None]
) -> None:
    skip_without_library()
    files, seen = read(CASES["speculators"], target_folder, tmp_path), list[Tensor]()
    ids, features = PROMPT * 6, torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
    for num_threads in (1, 3):
        set_threads(num_threads)
        served = Served(files, torch.float32)
        for cuts in ([48], [1, 20, 7, 20]):
            table, first, parts = served.runner.pool.new_table(), 0, list[Tensor]()
            for cut in cuts:
                end = first + cut
                row = Row(table, ids[first:end], first, cut, ids, features=features[first:end])
                parts.append(torch.cat([served.runner.forward([row]), served.path.hidden], dim=1))
                first = end
            seen.append(torch.cat(parts))
            table.free()
    assert all(torch.equal(one, seen[0]) for one in seen)


def settings(folder: str, **more: Any) -> DraftConfig:
    return DraftConfig(model=folder, device="cpu", max_slots=2, kv_cache_tokens=256, **more)


@pytest.mark.parametrize("path", ["fused", "paged"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 8e-2)])
def test_a_loaded_head_is_ready_to_run(
    dtype: str, tolerance: float, path: str, target_folder: str, tmp_path: Path
) -> None:
    if path == "fused":
        skip_without_library()
    case = CASES["speculators"]
    folder = made(case, target_folder).write(tmp_path, case.config, midlayer=False)
    loaded = load_head(settings(folder, dtype=dtype, attention_path=path), target_folder, EAGLE3)
    assert loaded.path.name == path
    facts, runner = loaded.facts, loaded.runner
    assert runner is not None
    pool = runner.pool
    assert (facts.vocab_size, facts.context_limit, facts.dtype, facts.eos_token_ids) == (VOCAB, 128, dtype, (5, 0))
    assert pool.num_blocks == 16 and runner.supports_trees
    assert runner.kv_bytes_per_token == 2 * 2 * 32 * (4 if dtype == "float32" else 2)
    head = made(case, target_folder)
    rows = head.rows(hidden_states(len(PROMPT)))
    row = Row(pool.new_table(), PROMPT, 0, 3, PROMPT, features=rows.to(torch.bfloat16))
    truth = head.forward(rows.to(torch.bfloat16).double(), PROMPT)[0][-3:]
    logits = runner.forward([row])[:, head.ids]
    assert difference(logits, truth) < tolerance
    assert loaded.path.hidden.shape == (3, WIDTH)
    row.table.free()
    assert pool.num_in_use == 0


def test_a_head_that_the_fused_path_gets_wrong_runs_on_its_own_modules(
    target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without_library()
    right = NativeModel.set_residual
    monkeypatch.setattr(NativeModel, "set_residual", lambda self, *, normed: right(self, normed=not normed))
    folder = Eagle3().write(tmp_path, ORIGINAL)
    with caplog.at_level("INFO"):
        assert load_head(settings(folder), target_folder, EAGLE3).path.name == "paged"
    assert "takes the path paged; not fused: computes other logits with this cache" in caplog.text
    with pytest.raises(ConfigError, match="cannot be served: fused: computes other logits"):
        load_head(settings(folder, attention_path="fused"), target_folder, EAGLE3)
