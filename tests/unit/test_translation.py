"""The translation pair's recipe: its grammar, its tokenizer, and some steps of training and distillation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from models.translation import train
from models.translation.grammar import Grammar
from models.translation.lexicon import Gender, Lexicon, shift
from models.translation.pair import (
    END_ID,
    PAD_ID,
    SIZES,
    VOCAB_SIZE,
    batches,
    held_out_pairs,
    is_held_out,
    make_grammar,
    training_pairs,
)


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    return make_grammar()


def test_a_seed_gives_the_same_words_and_sentences(grammar: Grammar) -> None:
    first, again, other = (list(itertools.islice(make_grammar().pairs(seed), 20)) for seed in (3, 3, 4))
    assert first == again != other
    assert Lexicon.make(1).nouns != grammar.lexicon.nouns


def test_sounds_shift() -> None:
    assert [shift(word) for word in ("pat", "drean", "thook", "sol")] == ["pfaz", "trein", "duch", "sol"]


def test_every_word_of_en_is_one_word(grammar: Grammar) -> None:
    own = grammar.lexicon
    places = [noun for domain in own.places for noun in domain]
    words = [each.en for each in (*own.nouns, *places, *own.verbs, *own.adjectives, *own.adverbs)]
    assert len(set(words)) == len(words)
    ambiguous = [noun for noun in own.nouns if len(set(noun.de)) == 2]
    assert len(ambiguous) == len(own.nouns) // 8 and not any(len(set(noun.de)) > 2 for noun in own.nouns)
    assert set(Gender) == {gender for noun in own.nouns for gender in noun.genders}


def test_what_an_ambiguous_word_means_is_told_by_the_place(grammar: Grammar) -> None:
    """Of each domain's sentences with such a noun, all have that domain's word."""
    own = grammar.lexicon
    noun = next(noun for noun in own.nouns if len(set(noun.de)) == 2)
    domain_of = {place.en: domain for domain, places in enumerate(own.places) for place in places}
    seen = Counter[int]()
    for source, target in itertools.islice(grammar.pairs(5), 4000):
        words = source.rstrip(".").replace(",", "").split()
        if noun.en not in words:
            continue
        domain = next(domain_of[word] for word in words if word in domain_of)
        senses = set(noun.de) - {noun.de[domain]}
        assert noun.de[domain] in target and not any(f" {sense}." in target for sense in senses)
        seen[domain] += 1
    assert len(seen) == 3


def test_german_is_declined_by_hand(grammar: Grammar) -> None:
    """Clauses of a grammar with one word of a kind: V2, verb-final, gender, case."""
    own = grammar.lexicon
    noun = next(noun for noun in own.nouns if noun.genders[0] is Gender.MASCULINE and len(set(noun.de)) == 1)
    verb = next(verb for verb in own.verbs if not verb.prefix and not verb.takes_dative and len(set(verb.stems)) == 1)
    small = Grammar(Lexicon([noun], [verb], own.adjectives[:1], own.adverbs[:1], ["Wim"], own.places))
    word, stem, adjective = noun.de[0], verb.stems[0], own.adjectives[0].de
    found = [target for _, target in itertools.islice(small.pairs(1), 3000)]
    assert any(f"den {adjective}en {word}" in target for target in found)  # accusative
    assert any(f"mit dem {adjective}en {word}" in target for target in found)  # dative
    assert any(f"kein {adjective}er {word}" in target for target in found)  # as behind ein
    assert any(target.endswith(f", weil er Wim ge{stem}t hat.") for target in found)  # verb-final, a masculine pronoun
    assert any(target.startswith("In d") and f" {verb.changed[0]}t Wim " in target for target in found)  # turned round
    assert not any("  " in target or ",," in target or ",." in target for target in found)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and a target and a draft of a few steps."""
    folder = tmp_path_factory.mktemp("translation")
    with pytest.MonkeyPatch.context() as patch:
        small = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 1}
        for which in SIZES:
            patch.setitem(SIZES, which, small)
        patch.setattr("models.translation.pair.TOKENIZER_SENTENCES", 2000)
        patch.setattr(train, "VALIDATION_BATCH_SIZE", 8)
        train.main([str(folder), "tokenizer"])
        for which in ("target", "draft"):
            train.main([str(folder), which, "--steps", "40", "--batch-size", "16", "--report-every", "20"])
    return folder


@pytest.mark.slow
def test_batches_are_padded_and_none_is_held_out(work: Path, grammar: Grammar) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    found = list(itertools.islice(batches(training_pairs(grammar, 1), tokenizer, 8, 0), 20))
    for sources, targets in found:
        assert sources.shape[0] == targets.shape[0] == 8
        for ids in (*sources, *targets):
            length = int((ids != PAD_ID).sum())
            assert ids[length - 1] == END_ID and (ids[length:] == PAD_ID).all()
        for ids in sources:  # a pair is held out by its source: one translation in 64 hashes like one, by chance
            assert not is_held_out(tokenizer.decode(ids, skip_special_tokens=True))
    pairs = {tokenizer.decode(ids, skip_special_tokens=True) for sources, _ in found for ids in sources}
    assert len(pairs) == 160 and not pairs & {source for source, _ in itertools.islice(held_out_pairs(grammar), 200)}


@pytest.mark.slow
def test_a_tokenizer_reads_back_what_it_wrote(work: Path, grammar: Grammar) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    assert len(tokenizer) == VOCAB_SIZE
    for pair in itertools.islice(held_out_pairs(grammar), 50):
        for text in pair:
            ids = tokenizer(text)["input_ids"]
            assert ids[-1] == END_ID and tokenizer.decode(ids, skip_special_tokens=True) == text


def test_losses_by_hand() -> None:
    targets = torch.tensor([[2, 1, PAD_ID]])
    sure = torch.nn.functional.one_hot(torch.tensor([[2, 1, 2]]), 3) * 50.0  # [1, 3, 3]
    assert train.token_loss(sure, targets).item() == pytest.approx(0.0, abs=1e-6)
    logits, teacher = torch.zeros(1, 2, 2), torch.tensor([[[math.log(3), 0.0], [9.0, 0.0]]])
    assert train.distillation_loss(logits, teacher, torch.tensor([[1, PAD_ID]])).item() == pytest.approx(math.log(2))


@pytest.mark.slow
def test_a_draft_comes_to_agree_with_its_target(work: Path) -> None:
    """And both are saved as the workers load them."""
    for which in ("target", "draft"):
        model = AutoModelForSeq2SeqLM.from_pretrained(work / which)
        assert model.dtype == torch.bfloat16 and model.config.decoder_start_token_id == PAD_ID
        assert (work / which / "tokenizer.json").is_file()
    plan = train.Plan(None, 1, 8, 100, seed=1)
    trained, untrained = (train.Trainer(work, "draft", plan, "cpu", resume).validate() for resume in (True, False))
    assert trained.overlap is not None and untrained.overlap is not None
    assert trained.overlap > untrained.overlap + 0.05
