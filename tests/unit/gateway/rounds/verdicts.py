"""Verdicts over an answer's tokens."""

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds.session import Session
from gateway.tokenizer import Tokenizer
from outrider.wire.requests.params import SamplingParams

PROMPT = (5, 6, 7)


def session_of(
    tokenizer: Tokenizer,
    *stop: str,
    stop_ids: tuple[int, ...] = (),
    prediction: tuple[int, ...] = (),
    explain: bool = False,
) -> Session:
    params, options = SamplingParams(max_tokens=16, stop_token_ids=stop_ids), SpeculationOptions(explain=explain)
    request = GenerationRequest("r", "m", PROMPT, params, stop=stop, prediction_ids=prediction, speculation=options)
    return Session(request, tokenizer, slot_id=1)
