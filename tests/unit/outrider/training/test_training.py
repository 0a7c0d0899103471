"""Training of drafters: losses by hand, the unrolled head against one run entry by entry, resuming to the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.heads import wiring
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import Eagle3Config
from outrider.engine.heads.families import EAGLE3, MEDUSA, family_of
from outrider.engine.heads.loader import load_head
from outrider.engine.loading.loader import load_runner
from outrider.engine.step_plan import Row
from outrider.papers.lookahead_embeddings import PassDrafter
from outrider.training import optimizing, written
from outrider.training import run as running
from outrider.training.eagle3 import Eagle3, Opened, attend_masked, visible
from outrider.training.losses import Law, acceptance, divergence, loss_of
from outrider.training.measure import measured
from outrider.training.medusa import Medusa
from outrider.training.pass_embeddings import Pass
from outrider.training.run import Plan, Run
from outrider.training.student import Draft, Student
from outrider.training.teacher import Batch, Teacher, shuffled
from outrider.training.train_head import default_taps, frequent_ids, without_shared
from outrider.training.written import Answer, Assignment, draw, write
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes.processes import StopRequested
from outrider.wire.settings.config import DraftConfig, TargetConfig
from tests.shrunk import shrunk
from tests.tiny_models import random_model, save, tiny_llama
from tests.unit.outrider.engine.heads import layouts as heads

LAW = torch.tensor([[0.75, 0.25]]).log()
EVEN = torch.tensor([[0.0, 0.0]])


def test_losses_by_hand() -> None:
    law, log_even = Law.of(LAW, None), EVEN.log_softmax(-1)
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(law, log_even).item() == pytest.approx(kl)
    assert divergence(law, LAW).item() == pytest.approx(0.0, abs=1e-6)
    assert acceptance(law, log_even).item() == pytest.approx(0.75)
    assert loss_of("kl", law, EVEN).item() == pytest.approx(kl)
    weight = math.exp(-3 * 0.75)
    assert loss_of("lk", law, EVEN).item() == pytest.approx(weight * kl + (1 - weight) * 0.25)


def test_the_weight_of_lk_is_a_constant_to_its_gradient() -> None:
    """KL and TV have the same gradient here, -1/4 for the first logit, and so has every mixture of them."""
    logits = EVEN.clone().requires_grad_(True)
    loss_of("lk", Law.of(LAW, None), logits).backward()
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx([-0.25, 0.25])


def test_ids_that_a_head_cannot_say_are_never_accepted() -> None:
    law = Law.of(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0, 2]))
    log_draft = torch.tensor([[0.6, 0.4]]).log()
    assert acceptance(law, log_draft).item() == pytest.approx(0.5 + 0.2)
    assert divergence(law, log_draft).item() == pytest.approx(0.5 * math.log(0.5 / 0.6) + 0.2 * math.log(0.2 / 0.4))


@pytest.mark.parametrize("traits", [{}, {"carry_normed": True, "num_layers": 2, "residual_normed": True}])
def test_the_unrolled_head_says_what_each_chain_says(traits: dict[str, Any]) -> None:
    """Every chain of every length, run by itself, entry by entry, in float64."""
    num_tokens, num_steps = 9, 4
    truth = heads.Eagle3(draft_vocab=heads.VOCAB, **traits)
    facts = Eagle3Config(
        layers=LlamaConfig(**{**heads.SHAPE, "num_hidden_layers": truth.num_layers}),
        width=heads.WIDTH,
        vocab_size=heads.VOCAB,
        draft_vocab_size=heads.VOCAB,
        taps=truth.taps,
        target_width=heads.WIDTH,
        norm_before_residual=truth.residual_normed,
        carries_normed=truth.carry_normed,
    )
    module = Opened(facts)
    tensors = dict(truth.tensors)
    module.fc.load_state_dict({"weight": tensors.pop("fc.weight")})
    module.head.load_state_dict(tensors)
    module.double()
    ids = torch.randint(0, heads.VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(2))
    hidden = heads.hidden_states(num_tokens)  # [n + 1, T, dt]
    taps = torch.stack([hidden[k] for k in truth.taps], dim=1)  # [T, m, dt]
    read = module(ids[None], taps[None], num_steps)
    for step, output in enumerate(read):
        for base in range(num_tokens - 1 - step):
            chain = ids[1 : base + step + 2].tolist()
            logits, _ = truth.carried(truth.rows(hidden)[: base + 1], chain)
            own = module.head.lm_head(output[0, base + step])
            torch.testing.assert_close(own, logits[-1], rtol=1e-5, atol=1e-6)  # rotary angles are float32


def test_heads_that_have_keys_of_their_own_attend_as_groups_do() -> None:
    """As on a GPU, where a kernel that holds no scores takes them so."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((4, 6), (2, 12), (2, 12)))
    mask = visible(6, 1, torch.device("cpu"))
    own, grouped = (attend_masked(query, key, value, mask, 0.3, repeats_heads=repeats) for repeats in (True, False))
    torch.testing.assert_close(own, grouped)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", "auto")])
def test_a_target_to_learn_from_keeps_its_dtype_on_a_gpu(
    device: str, dtype: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path)
    asked: list[object] = []

    def from_pretrained(folder: str, **options: Any) -> None:
        asked.append(options["dtype"])
        raise OSError("read no further")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(OSError, match="read no further"):
        Teacher(folder, device)
    assert asked == [dtype]


def test_what_is_asked_of_a_batch() -> None:
    batch = Batch.of(
        [Answer(np.arange(6, dtype=np.int32), 3, 0.0), Answer(np.arange(4, dtype=np.int32), 2, 0.0)], "cpu"
    )
    assert batch.ids.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 0]]
    asked = [[places.nonzero()[:, 0].tolist() for places in batch.asked(depth)] for depth in range(3)]
    assert asked == [[[2, 3, 4], [1, 2]], [[3, 4], [2]], [[4], []]]


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is good at."""
    monkeypatch.setattr(optimizing, "has_bfloat16", lambda device: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("training")
    tiny_llama(made / "target", seed=4, hidden_size=16, num_layers=3, context=64, sharpness=2.0)
    tiny_llama(made / "draft", seed=3, hidden_size=8, num_layers=1, context=64)
    return made


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher(str(folder / "target"), "cpu")


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetFiles:
    return TargetFiles(str(folder / "target"))


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Answer]:
    prompts = [([5 + i, 6, 7], (0.0, 1.0)[i % 2]) for i in range(6)]
    return write(Assignment(str(folder / "target"), prompts, 12, seed=1), folder, lambda done, total: None)


def says_the_same(one: Student, other: Student, batch: Batch, teacher: Teacher) -> None:
    """As far as bfloat16 lets it."""
    seen = teacher.see(batch)
    both = zip(one.guesses(batch, seen, 2), other.guesses(batch, seen, 2), strict=True)
    for mine, its in both:
        assert torch.equal(mine.places, its.places)
        assert (mine.logits - its.logits).abs().max() < 0.05 * mine.logits.std()


KEPT = torch.arange(3, 320, 2)
EAGLES: dict[str, tuple[bool, torch.Tensor | None, set[str]]] = {
    "of a tied draft": (True, None, {"embed_tokens.weight"}),
    "of the target": (False, None, {"lm_head.weight"}),
    "with fewer ids": (True, KEPT, {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}),
}


@pytest.mark.parametrize("case", EAGLES)
def test_a_saved_eagle_is_the_one_that_was_trained(
    case: str, folder: Path, teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    starts, kept, vocabulary = EAGLES[case]
    start = None
    if starts:
        start = str(tmp_path / "draft")
        tiny_llama(start, seed=3, hidden_size=8, num_layers=1, context=64)
        config = Path(start) / "config.json"
        config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    student = Eagle3(Opened.new(target, start, (0, 2), kept, seed=5), 2, "cpu")
    (tmp_path / "head").mkdir()
    student.save(tmp_path / "head")
    files = Checkpoint(str(tmp_path / "head"))
    assert family_of(files) is EAGLE3
    assert files.names & {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} == vocabulary
    loaded = Eagle3.load(str(tmp_path / "head"), target, "cpu")
    says_the_same(student, loaded, Batch.of(answers, "cpu"), teacher)
    if kept is not None:
        assert loaded.ids is not None and torch.equal(loaded.ids, kept)


def test_a_head_has_the_rotary_base_of_the_layers_that_see_all(folder: Path) -> None:
    """Where a target's layers have windows of their own, such as Gemma 3's."""
    save(random_model(shrunk("gemma3_text"), seed=1), folder / "windows")
    rope = Opened.new(TargetFiles(str(folder / "windows")), None, (0,), None, seed=5).head.facts.layers.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1_000_000.0}


@pytest.mark.parametrize("kept", [None, torch.arange(3, 97, 2)])
def test_a_head_says_in_serving_what_it_says_in_training(
    kept: torch.Tensor | None, folder: Path, tmp_path: Path
) -> None:
    """Of its first token and of one behind its own carry, for Gemma 3: a tied target that scales its embedding, whose
    rows a head reads unscaled. The served target's hidden states are those of its own path.
    """
    gemma = save(random_model(shrunk("gemma3_text"), seed=1), tmp_path / "target")
    student = Eagle3(Opened.new(TargetFiles(gemma), None, (0, 1), kept, seed=5), 2, "cpu")
    (tmp_path / "head").mkdir()
    student.save(tmp_path / "head")
    ids = [5 + 7 * i % 40 for i in range(40)]  # more than a window
    batch = Batch.of([Answer(np.array(ids, dtype=np.int32), 2, 0.0)], "cpu")
    runner = load_runner(TargetConfig(model=gemma, device="cpu"))
    runner.set_taps((0, 1))
    runner.forward([Row.of(runner.pool.new_table(), ids, 0, 1)])
    taps = dict(enumerate(runner.features.unbind(1)))
    loaded = load_head(DraftConfig(model=str(tmp_path / "head"), device="cpu"), gemma, EAGLE3)
    seen = wiring.Seen(ids, taps, torch.empty(0))
    steps = (wiring.text_logits(loaded, seen, (0, 1)), wiring.text_logits(loaded, seen, (0, 1), ahead=2))
    assert (runner.path.name, loaded.path.name) == ("fused", "fused")
    for guess, logits in zip(student.guesses(batch, Teacher(gemma, "cpu").see(batch), 2), steps, strict=True):
        said = logits[guess.places - 1 - guess.depth]
        said = said if kept is None else said[:, kept]
        assert (said - guess.logits).abs().max() < 0.05 * guess.logits.std(), "as far as bfloat16 lets it"


def test_medusas_heads_read_the_row_before_what_they_skip(
    teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    student = Medusa.new(target, 3, "cpu")
    batch = Batch.of(answers, "cpu")
    seen = teacher.see(batch)
    length = batch.ids.shape[1]
    said = teacher.network(batch.ids).logits.flatten(0, 1)  # [B * T, V]
    for guess in student.guesses(batch, seen, 3):  # untrained: what the target says after the token that was read
        rows = said[guess.places - 1 - guess.depth]
        torch.testing.assert_close(guess.logits, rows, rtol=1e-4, atol=1e-4)
        assert ((guess.places - 1 - guess.depth) // length == guess.places // length).all()
    with torch.no_grad():
        for parameter in student.module.blocks.parameters():
            parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    student.save(tmp_path)
    files = Checkpoint(str(tmp_path))
    assert family_of(files) is MEDUSA and not any("lm_head" in name for name in files.names)
    says_the_same(student, Medusa.load(str(tmp_path), target, "cpu"), batch, teacher)


@pytest.mark.parametrize("path", ["fused", "paged", "dense"])
@pytest.mark.parametrize("kind", ["gemma3_text", "llama"])
def test_look_ahead_embeddings_say_when_served_what_they_say_in_training(kind: str, path: str, tmp_path: Path) -> None:
    """Behind the prompt's last token and behind others, for Gemma 3, too: a tied target that scales its embedding and
    has windows.
    """
    model, num = save(random_model(shrunk(kind), seed=1), tmp_path / "target"), 3
    teacher = Teacher(model, "cpu")
    student = Pass.new(teacher, num, seed=1)
    student.save(tmp_path)
    saved = Pass.load(str(tmp_path), teacher)
    ids = [5 + 7 * i % 40 for i in range(40)]  # more than a window
    batch = Batch.of([Answer(np.array(ids, dtype=np.int32), 20, 0.0)], "cpu")
    runner = load_runner(
        TargetConfig(model=model, device="cpu", attention_path=path, lookahead_embeddings=str(tmp_path))  # type: ignore[arg-type]
    )
    served = PassDrafter(runner.facts.vocab_size, num)
    said = dict[tuple[int, int], torch.Tensor]()
    for last in (19, 20, 30, 36):
        slot: Any = SimpleNamespace(committed=ids[: last + 1], max_len=99, key=(1, 1))
        rows = served.rows_beside(slot, [])
        assert rows is not None
        parents = [*range(-1, last), *(last + 1 + parent for parent in rows.parents)]
        table = runner.pool.new_table()
        row = Row(table, [*slot.committed, *rows.ids], 0, num, [], parents)
        said |= {(last + 1 + depth, depth): logits for depth, logits in enumerate(runner.forward([row]))}
        table.free()
    num_compared = 0
    for guess in saved.guesses(batch, teacher.see(batch), num):
        assert guess.places.tolist() == list(range(20 + guess.depth, 39))
        for place, logits in zip(guess.places.tolist(), guess.logits, strict=True):
            if (place, guess.depth) in said:
                num_compared += 1
                torch.testing.assert_close(logits, said[place, guess.depth], rtol=1e-3, atol=1e-3)
    assert num_compared == 3 * num + 2


def test_a_target_accepts_itself_at_every_depth(folder: Path, teacher: Teacher, answers: list[Answer]) -> None:
    for temperature in (0.0, 0.7, 1.0):
        means = {}
        for name in ("target", "draft"):
            student = Draft(str(folder / name), teacher.vocab_size, "cpu")
            rows = measured(name, student, teacher, answers, temperature)
            assert [row["depth"] for row in rows] == [1, 2, 3]
            assert [row["num_tokens"] for row in rows] == [
                sum(max(0, len(answer.ids) - answer.start - depth) for answer in answers) for depth in range(3)
            ]
            means[name] = [row["mean"] for row in rows]
        assert means["target"] == pytest.approx([1.0] * 3, abs=1e-5) and max(means["draft"]) < 0.9


def test_a_target_without_hidden_states_is_refused(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = teacher.network
    monkeypatch.setattr(
        teacher, "network", lambda **asked: SimpleNamespace(logits=whole(**asked).logits, hidden_states=None)
    )
    with pytest.raises(ConfigError, match="gives no hidden state of width 16 before each of its 3 layers"):
        teacher.check_hidden()


def students(folder: Path, target: TargetFiles, teacher: Teacher) -> dict[str, Callable[[], Student]]:
    draft = str(folder / "draft")
    return {
        "eagle3": lambda: Eagle3(Opened.new(target, draft, (1, 2), None, seed=5), 2, "cpu"),
        "medusa": lambda: Medusa.new(target, 2, "cpu"),
        "pass": lambda: Pass.new(teacher, 2, seed=5),
        "draft": lambda: Draft(draft, target.vocab_size, "cpu"),
    }


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pass", "draft"])
def test_an_interrupted_training_comes_to_the_same_bits(
    kind: str, folder: Path, teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    make, plan = students(folder, target, teacher)[kind], Plan("lk", 7, 4, seed=3)

    def weights(name: str, ends: list[int]) -> dict[str, torch.Tensor]:
        """Train in as many processes' worth of objects as there are ends."""
        for end in ends:
            student = make()
            run = Run(student, teacher, answers, plan, tmp_path / name, {"kind": kind})
            run.go_on(None, lambda run=run, end=end: run.num_updates >= end, lambda progress: None)  # type: ignore[misc]
        assert run.is_done
        return dict(student.module.state_dict())

    whole, parts = weights("whole", [7]), weights("parts", [2, 3, 7])
    untrained = make().module.state_dict()
    assert any(not torch.equal(whole[name], untrained[name]) for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(ConfigError, match="was begun with updates 7, not 8"):
        Run(make(), teacher, answers, replace(plan, updates=8), tmp_path / "parts", {"kind": kind})


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "pass", "draft"])
def test_an_update_in_bfloat16_is_nearly_the_same(
    kind: str,
    folder: Path,
    teacher: Teacher,
    target: TargetFiles,
    answers: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = []
    for in_bfloat16 in (False, True):
        monkeypatch.setattr(optimizing, "has_bfloat16", lambda device, found=in_bfloat16: found)
        run = Run(
            students(folder, target, teacher)[kind](),
            teacher,
            answers,
            Plan("kl", 7, 4, 3),
            tmp_path / str(in_bfloat16),
            {},
        )
        losses.append([run.update(Batch.of(answers, "cpu")) for _ in range(2)])
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.02)


def test_time_ends_a_training_and_leaves_its_schedule(
    folder: Path,
    teacher: Teacher,
    target: TargetFiles,
    answers: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(running.time, "monotonic", lambda: float(next(clock)))
    run = Run(Medusa.new(target, 1, "cpu"), teacher, answers, Plan("kl", 50, 2, seed=0), tmp_path, {})
    run.go_on(6.0, lambda: False, lambda progress: None)
    assert 0 < run.num_updates < 5 and not run.is_done
    again = Run(Medusa.new(target, 1, "cpu"), teacher, answers, Plan("kl", 50, 2, seed=0), tmp_path, {})
    assert again.num_updates == run.num_updates


def test_a_loss_that_is_not_finite_ends_the_training(
    teacher: Teacher, target: TargetFiles, answers: list[Answer], tmp_path: Path
) -> None:
    student = Medusa.new(target, 1, "cpu")
    run = Run(student, teacher, answers, Plan("kl", 5, 2, seed=0), tmp_path, {})
    with torch.no_grad():
        next(student.module.blocks.parameters()).fill_(math.nan)
    with pytest.raises(OutriderError, match="the loss is nan after 0 updates"):
        run.go_on(None, lambda: False, lambda progress: None)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_every_answer_comes_once_an_epoch() -> None:
    order = shuffled(6, 4, seed=1)
    batches = np.concatenate([next(order) for _ in range(6)])
    epochs = batches.reshape(4, 6)
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert any((epochs[0] != epoch).any() for epoch in epochs[1:])


def test_writing_goes_on_with_the_same_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "AT_ONCE", 2)
    prompts = [([5 + i, 6] + [7] * i, (0.0, 0.7, 1.0)[i % 3]) for i in range(5)]
    task = Assignment(str(folder / "target"), prompts, 8, seed=1)
    whole = write(task, tmp_path / "whole", lambda done, total: None)
    assert [answer.start for answer in whole] == [2, 3, 4, 5, 6]
    assert all(answer.ids[: answer.start].tolist() == ids for answer, (ids, _) in zip(whole, prompts, strict=True))

    def stops(done: int, total: int) -> None:
        if done > 4 * 8:  # in the middle of a part
            raise StopRequested

    with pytest.raises(StopRequested):
        write(task, tmp_path / "parts", stops)
    parts = tmp_path / "parts" / f"text-{task.digest}"
    first = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert sorted(first) == ["00000.npz", "00001.npz"]
    again = write(task, tmp_path / "parts", lambda done, total: None)
    assert [answer.ids.tolist() for answer in again] == [answer.ids.tolist() for answer in whole]
    assert {name: (parts / name).stat().st_mtime_ns for name in first} == first


def test_a_drawn_id_follows_the_law_and_the_best_is_taken_at_0() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3]]).log().repeat(1000, 1)
    uniforms = (np.arange(1000) + 0.5) / 1000
    assert np.bincount(draw(logits, [1.0] * 1000, uniforms)).tolist() == [500, 200, 300]
    squares = np.array([0.25, 0.04, 0.09]) / 0.38
    assert np.bincount(draw(logits, [0.5] * 1000, uniforms)) == pytest.approx(1000 * squares, abs=1)
    assert set(draw(logits, [0.0] * 1000, uniforms)) == {0}


def test_ids_that_float32_cannot_tell_apart_in_a_sum_are_drawn_as_often_as_they_should() -> None:
    """All of them are less likely than half the distance of the float32 numbers around 1."""
    num, less = 4, 2.0**-26
    logits = torch.tensor([1.0, *[less] * num]).log()[None]
    middles = (1.0 + less * (np.arange(num) + 0.5)) / (1.0 + num * less)
    assert [draw(logits, [1.0], np.array([middle]))[0] for middle in middles] == [1, 2, 3, 4]


def test_prompts_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    def fails(ids: list[int], max_tokens: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            write(Assignment(str(folder / "target"), [(ids, 0.0)], max_tokens, 0), tmp_path, lambda done, total: None)

    fails([5] * 10, 60, "are 70, the context limit of .* is 64; lower --max-tokens")
    fails([5], 10, r"token ids \[5\], must have 2 or more")


def test_prompts_that_overlap_with_one_held_apart_are_left_out() -> None:
    apart = "x" * 20 + "the quick brown fox jumps over the lazy dog, and then it sleeps" + "y" * 20
    shares, shares_less = apart[15:65] + "z", apart[15:64] + "z"
    assert without_shared([shares, "fox", shares_less], [apart]) == ["fox", shares_less]
    assert without_shared(["short", "shorter"], ["short"]) == ["shorter"]


def test_taps_are_the_published_ones_where_there_are_layers_enough() -> None:
    assert default_taps(32) == [2, 16, 29] and default_taps(6) == [1, 3, 5]
    assert default_taps(1) == [0] and default_taps(2) == [1]


def test_the_most_frequent_ids_are_kept() -> None:
    answers = [Answer(np.array([1, 1, 1, 7, 7, 3, 5, 3], dtype=np.int32), 3, 0.0)]  # 1 is only in the prompt
    assert frequent_ids(answers, 3, 9).tolist() == [3, 5, 7]
    with pytest.raises(ConfigError, match="--draft-vocab is 10, must be 1 to 9"):
        frequent_ids(answers, 10, 9)
