"""What workers are told of a search: one that opens its slot anew all levels, one that has the slot those it lacks."""

from gateway.generation import GenerationRequest
from gateway.rounds.beam_session import BeamSession
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.requests.params import BeamParams, SamplingParams
from tests.service.scripted_generator import TIMINGS, demo_tokenizer

PROMPT = (5, 6, 7)
LEVELS = [pb.BeamLevel(parents=[0, place], ids=[8, 9], sums=[-1.0, -2.0]) for place in (0, 1, 1)]


def test_levels_are_resent_to_a_slot_that_is_opened_again() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, beams=BeamParams(2))
    session = BeamSession(GenerationRequest("r", "m", PROMPT, params), demo_tokenizer(), slot_id=1)
    for levels in (LEVELS[:2], LEVELS[2:]):
        kinds = [pb.TOKEN_KIND_ACCEPTED] * (len(levels) - 1) + [pb.TOKEN_KIND_BONUS]
        session.apply(tpb.Verdict(committed_len=session.committed_len, levels=levels, kinds=kinds), TIMINGS)
    assert (session.committed_len, session.max_draft_tokens()) == (len(PROMPT) + 3, 8 - 3 - 1)
    assert list(session.open_message().committed_ids) == list(PROMPT)
    assert session.resumed(session.committed_len) == {"base_len": len(PROMPT), "levels": LEVELS}
    assert session.fields_after(len(PROMPT) + 1) == {"base_len": len(PROMPT) + 1, "levels": LEVELS[1:]}
