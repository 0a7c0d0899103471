"""A draft of another tokenizer over a tiny model: what it sends is what an uncached model says of the text as the draft
would write it, over the target's tokens, however the answer went on.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from draft_service.slot_jobs import AdvanceJob
from draft_service.slots.translated_slot import TranslatedSlot, make_slot
from outrider.drafting.translation import Intersection, Translation
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.sampling.grammar_state import Grammars
from outrider.engine.sampling.wire_tensors import decode_distributions
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.worker.jobs import SlotVocabulary
from outrider.engine.worker.slots import SlotTable
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.speculation import Speculation
from tests.other_tokenizers import TEXT, byte_level, digits_apart, json_of
from tests.tiny_models import tiny_llama
from tests.unit.target_service.step.test_step import NUM_SLOTS, Base, load, open_job

CONTEXT = 256
TARGET, DRAFT = byte_level(), digits_apart()
TARGET_SIZE = TARGET.get_vocab_size() + 3
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_llama(path, DRAFT.get_vocab_size(), sharpness=3.0, context=CONTEXT)
    DRAFT.save(str(path / "tokenizer.json"))
    return str(path)


@pytest.fixture(scope="module")
def runner(folder: str) -> ModelRunner:
    return load(folder, NUM_BLOCKS, batch_invariant=False)


@pytest.fixture(scope="module")
def truth(folder: str) -> Iterator[UncachedModel]:
    yield UncachedModel(AutoModelForCausalLM.from_pretrained(folder).eval())


@pytest.fixture(scope="module")
def translation() -> Intersection:
    return Intersection(json_of(TARGET), json_of(DRAFT), TARGET_SIZE, DRAFT.get_vocab_size(), (0,))


@pytest.fixture
def by_strings(translation: Intersection) -> Iterator[Intersection]:
    translation.by_strings = True
    yield translation
    translation.by_strings = False


class Draft(Base):
    """Of one slot."""

    def __init__(self, runner: ModelRunner, translation: Translation, context_limit: int = CONTEXT) -> None:
        super().__init__(runner, NUM_BLOCKS)
        self.table = SlotTable(self.pool, NUM_SLOTS, CONTEXT, partial(make_slot, context_limit))
        self.keeper.table = self.table
        self.grower = self.make_grower(runner, self.sent)
        self.translation = translation
        self.sent_nodes: list[Delivery] = []

    def sent(self, address: str, epoch: int, nodes: Delivery) -> None:
        self.sent_nodes.append(nodes)

    def open(self, ids: list[int], speculation: Speculation, **options: Any) -> None:
        grammars = Grammars(json_of(TARGET), TARGET_SIZE, [0], must_follow=False)
        vocabulary = SlotVocabulary(TARGET_SIZE, (0,), grammars, self.translation)
        job = open_job(1, ids, max_tokens=200, **options)
        self.grower.handle(replace(job, speculation=speculation, vocabulary=vocabulary))

    def advance(self, ids: list[int], base_len: int, num_steps: int = 1000) -> None:
        """Commit, grow, and have all that is known sent again."""
        self.grower.handle(AdvanceJob(1, 1, 1, base_len, tuple(ids[base_len:])))
        while num_steps and self.grower.step(time.monotonic()):
            num_steps -= 1
        self.sent_nodes.clear()
        growing = self.grower._slots[1, 1]
        growing.tree.resend()
        growing.num_urgent = 1
        self.grower._pusher.push_due(growing)

    @property
    def slot(self) -> TranslatedSlot:
        slot = self.table.get(1, 1)
        assert isinstance(slot, TranslatedSlot)
        return slot

    def children(self, path: tuple[int, ...] = ()) -> list[int]:
        """Under what is committed, by rank."""
        found: dict[tuple[int, ...], int] = {}
        for nodes in self.sent_nodes:
            paths: list[tuple[int, ...]] = []
            for token_id, parent, rank in zip(nodes.ids, nodes.parents, nodes.ranks, strict=True):
                paths.append((*(() if parent == ROOT else paths[parent]), token_id))
                found[paths[-1]] = rank
        return sorted((each[-1] for each in found if each[:-1] == path), key=lambda each: found[(*path, each)])


def logits_after(
    truth: UncachedModel, translation: Translation, ids: list[int], path: tuple[int, ...] = ()
) -> np.ndarray:
    """By a model that is fed all at once: the committed tokens as the draft would write them, and guesses behind."""
    retokenization = translation.retokenization()
    retokenization.commit(ids, 0)
    told = [*retokenization.ids, *map(translation.draft_id, path)]
    return translation.logits(truth.forward(told)[-1].numpy())


def check(truth: UncachedModel, draft: Draft, ids: list[int]) -> None:
    """The guesses after the root, and after its first child, are the model's."""
    path: tuple[int, ...] = ()
    for _ in range(2):
        found = draft.children(path)
        logits = logits_after(truth, draft.translation, ids, path)
        assert found and found == np.argsort(-logits, kind="stable")[: len(found)].tolist()
        path = (*path, found[0])


def ids_of(text: str) -> list[int]:
    return TARGET.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def test_draft_tokens_are_the_model_s_through_hits_and_misses(
    runner: ModelRunner, truth: UncachedModel, translation: Intersection
) -> None:
    """Accepted guesses, which the draft may write otherwise once they are text, and the target's own tokens, with which
    they merge.
    """
    draft, text, dice = Draft(runner, translation), ids_of(TEXT), random.Random(5)
    ids, num_went_on, num_retold = text[:20], 0, 0
    draft.open(ids, Speculation(max_draft_tokens=16))
    draft.advance(ids, len(ids))
    check(truth, draft, ids)
    for _ in range(30):
        before, path = len(ids), tuple[int, ...]()
        for _ in range(dice.randrange(0, 4)):
            guesses = draft.children(path)
            if guesses:
                path = (*path, dice.choice(guesses[:2]))
        ids += path
        if dice.random() < 0.5 or not path:
            start = dice.randrange(20, len(text) - 4)
            ids += text[start : start + dice.randrange(1, 4)]
        draft.advance(ids, before)
        told = list(draft.slot.ids)
        retokenization = translation.retokenization()
        retokenization.commit(ids, 0)
        assert told == retokenization.ids
        num_cached = min(len(told), len(draft.slot.cached))
        assert draft.slot.cached[:num_cached] == told[:num_cached]
        if retokenization.is_whole:
            check(truth, draft, ids)
        else:
            assert not draft.children()
        went_on = bool(path) and told[-len(path) :] == [translation.draft_id(each) for each in path]
        num_went_on, num_retold = num_went_on + went_on, num_retold + (not went_on)
    assert num_went_on >= 3 and num_retold >= 3


def test_draft_tokens_that_the_draft_writes_otherwise_are_fed_again(
    runner: ModelRunner, truth: UncachedModel, translation: Intersection
) -> None:
    """The tree under the first of two tokens holds the second. Once both are committed they are one of the draft's."""
    first, second = [*ids_of("r"), *ids_of("e")], ids_of("st")
    merged = DRAFT.encode("rest").ids
    assert (len(first), len(second), len(merged)) == (2, 1, 1)
    ids = [*ids_of("    def "), *first]
    draft = Draft(runner, translation)
    draft.open(ids, Speculation(max_draft_tokens=16), logit_bias={second[0]: 100.0})
    draft.advance(ids, len(ids))
    assert draft.children()[0] == second[0]
    after = draft.children((second[0],))
    assert after
    ids += second
    draft.advance(ids, len(ids) - 1)
    assert draft.slot.ids[-len(merged) :] == merged
    assert draft.slot.cached[: len(draft.slot.ids)] == draft.slot.ids
    for path in ((), (second[0],)):
        logits, found = logits_after(truth, translation, ids, path), draft.children(path)
        logits[second[0]] += 100.0
        assert len(found) > 1 and found == np.argsort(-logits, kind="stable")[: len(found)].tolist()


def test_a_draft_token_that_continued_is_fed_again_where_the_following_text_merges_with_it(
    runner: ModelRunner, translation: Intersection
) -> None:
    ids, (first,), (second,), (third,) = ids_of("    def "), ids_of("r"), ids_of("e"), ids_of("(")
    draft = Draft(runner, translation)
    draft.open(ids, Speculation(max_draft_tokens=16), logit_bias={first: 100.0})
    draft.advance(ids, len(ids))
    assert draft.children()[0] == first
    ids.append(first)
    draft.advance(ids, len(ids) - 1)
    assert draft.slot.ids[-1] == translation.draft_id(first)
    assert draft.slot.is_cache_committed(len(draft.slot.ids))  # and it went on
    ids += [second, third]
    draft.advance(ids, len(ids) - 2)
    assert draft.slot.ids[-2:] == DRAFT.encode("re(").ids
    assert draft.slot.cached[: len(draft.slot.ids)] == draft.slot.ids


def test_where_few_tokens_are_shared_the_draft_s_text_is_proposed(
    runner: ModelRunner, truth: UncachedModel, by_strings: Intersection
) -> None:
    """Through hits and misses, behind which it is written anew."""
    draft, text, dice, num_read = Draft(runner, by_strings), ids_of(TEXT), random.Random(7), 0
    ids = text[:20]
    draft.open(ids, Speculation(max_draft_tokens=16))
    before = len(ids)
    for _ in range(16):
        draft.advance(ids, before)
        retokenization = by_strings.retokenization()
        retokenization.commit(ids, 0)
        assert draft.slot.ids == retokenization.ids
        path = tuple[int, ...]()
        while children := draft.children(path):
            assert len(children) == 1
            path = (*path, children[0])
        found = list(path)
        if retokenization.is_whole:
            told, written = list(retokenization.ids), list[int]()
            for _ in range(len(draft.slot.written)):
                written.append(int(truth.forward([*told, *written])[-1].argmax()))
            assert draft.slot.written == written
            own = "".join(DRAFT.id_to_token(each) for each in written)
            assert own.startswith("".join(TARGET.id_to_token(each) for each in found))
            num_read += len(found) > 1
        before = len(ids)
        ids += found[: dice.randrange(len(found) + 1)]
        if dice.random() < 0.5 or len(ids) == before:
            start = dice.randrange(20, len(text) - 4)
            ids += text[start : start + dice.randrange(1, 4)]
    assert num_read >= 4


def test_a_distribution_is_the_draft_s_over_the_shared_tokens(
    runner: ModelRunner, truth: UncachedModel, translation: Intersection
) -> None:
    draft, ids = Draft(runner, translation), ids_of(TEXT)[:30]
    speculation = Speculation(3, 3, None, DraftLogprobs.FULL, is_sequential=True)
    draft.open(ids, speculation, temperature=0.8, seed=3)
    draft.advance(ids, len(ids))
    (nodes,) = draft.sent_nodes
    assert set(nodes.kinds) == {NodeKind.SAMPLED} and len(nodes.ids) == 3 and nodes.rows is not None
    assert nodes.vocab_size == TARGET_SIZE
    laws = decode_distributions(nodes.rows, TARGET_SIZE, [[each] for each in nodes.ids])
    for depth, law in enumerate(laws):
        logits = logits_after(truth, translation, ids, tuple(nodes.ids[:depth])).astype(np.float64) / 0.8
        expected = np.exp(logits - logits.max())
        found = np.exp(law.dense_scores().astype(np.float64))
        assert np.abs(found - expected / expected.sum()).max() < 1e-4
        assert law.prob(nodes.ids[depth]) > 0


def test_nothing_is_drafted_within_a_character_and_past_the_drafts_context(
    runner: ModelRunner, truth: UncachedModel, translation: Intersection
) -> None:
    limit, text = 64, ids_of(TEXT)
    draft, ids = Draft(runner, translation, limit), ids_of("x = '")
    draft.open(ids, Speculation(max_draft_tokens=16))
    emoji = [TARGET.token_to_id(char) for char in "ðŁĺĢ"]
    for token_id in emoji[:3]:
        ids.append(token_id)
        draft.advance(ids, len(ids) - 1)
        assert not draft.children()
    ids.append(emoji[3])
    draft.advance(ids, len(ids) - 1)
    check(truth, draft, ids)
    while len(draft.slot._retokenization.ids) <= limit:
        before = len(ids)
        ids += text[before : before + 5]
        draft.advance(ids, before)
        assert len(draft.slot.ids) <= limit
        num_left = limit - len(draft.slot.ids)
        deepest = max((len(nodes.ids) for nodes in draft.sent_nodes), default=0)
        assert bool(deepest) == (len(draft.slot._retokenization.ids) <= limit), num_left
    assert not draft.children() and draft.slot.cached == draft.slot.ids[: len(draft.slot.cached)]


def test_where_all_shared_tokens_are_banned_nothing_is_drafted(runner: ModelRunner, translation: Intersection) -> None:
    """A token that the draft lacks is all that is left."""
    shared = np.flatnonzero(translation.logits(np.zeros(DRAFT.get_vocab_size(), np.float32)) > -np.inf).tolist()
    draft, ids = Draft(runner, translation), ids_of("def main")
    banned = tuple((each,) for each in shared)
    for options in ({"temperature": 0.0}, {"temperature": 1.0}):
        draft.open(ids, Speculation(3, 3), bad_words=banned, **options)
        draft.advance(ids, len(ids))
        assert not draft.children()
