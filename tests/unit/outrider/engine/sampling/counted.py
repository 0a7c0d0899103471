"""Laws that are counted."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from outrider.drafting.lookup import Lookup
from outrider.drafting.ngram import Ngram
from outrider.drafting.sequence_drafter import SequenceDrafter
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.followers import TableDrafter
from outrider.papers.count_tables import Bigram, Unigram
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from target_service.drafting.own_drafts import OwnDrafts

VOCAB, K = 3, 2
SEQUENCE = [0, 1, 2, 0, 1, 1, 2, 1, 2, 0, 1]
DRAFTERS: dict[str, Callable[[], SequenceDrafter]] = {
    "ngram": Ngram,
    "ngram, trigrams alone": lambda: Ngram(orders=(3,)),
    "lookup": lambda: Lookup(1, 4),
    "unigram": lambda: Unigram(SEQUENCE),
    "bigram": lambda: Bigram([0, 1, 1, 0, 2, 0, 1, 2]),
}
PARAMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "cut": SamplingParams(top_k=2, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={1: 0.8, 2: -0.5}
    ),
    "bans": SamplingParams(bad_words=((2,), (0, 1)), min_tokens=4, max_tokens=9, stop_token_ids=(0,)),
}


def state_of(params: SamplingParams) -> SamplingState:
    state = SamplingState(params, SEQUENCE[:6], ())
    state.set_output(SEQUENCE[6:])
    return state


def opened(drafter: SequenceDrafter, params: SamplingParams, source: tuple[int, ...] = ()) -> tuple[OwnDrafts, Any]:
    """What follows a slot that has this sequence."""
    own = OwnDrafts({Drafter.NGRAM: TableDrafter(drafter, VOCAB)})
    slot: Any = SimpleNamespace(key=(1, 1), committed=SEQUENCE, num_prompt=6, params=params, max_len=99)
    slot.num_source_tokens = len(source)
    job: Any = SimpleNamespace(own_drafters=(Drafter.NGRAM,), corpus_id=b"", source_ids=source)
    own.open(job, slot)
    return own, slot
