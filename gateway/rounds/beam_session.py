"""Holds the state of a beam search: levels instead of tokens, and at the end one output for each beam. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation import (
    AnswerUsage,
    FinishReason,
    GenerationRequest,
    OutputTimings,
    OutputToken,
    RoundOutput,
    TokenKind,
)
from gateway.rounds.detokenizer import detokenizer_of
from gateway.rounds.session import Session
from gateway.telemetry.request_record import current_record
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb


class BeamSession(Session):
    """State of a beam search. A slot is opened with the prompt and then brought to the levels so far.

    Until the search is over nothing is final but what all beams begin with. Its outputs come at the end, the best
    first.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, slot_id: int) -> None:
        super().__init__(request, tokenizer, slot_id)
        self.levels: list[pb.BeamLevel] = []
        self._kinds: list[TokenKind] = []  # by level
        self._answers: list[RoundOutput] = []

    @property
    def committed_len(self) -> int:
        return self.num_prompt + len(self.levels)

    @property
    def num_output(self) -> int:
        return len(self.levels)

    def resumed(self, agreed_len: int) -> dict[str, Any]:
        return {"base_len": self.num_prompt, "levels": self.levels}

    def news(self, agreed_len: int) -> dict[str, Any]:
        return {"base_len": agreed_len, "levels": self.levels[agreed_len - self.num_prompt :]}

    def num_committed_by(self, verdict: tpb.Verdict) -> int:
        return len(verdict.levels)

    def apply(self, verdict: tpb.Verdict, timings: OutputTimings) -> RoundOutput:
        """Commit a verdict's levels.

        The returned output holds the counts of the round; `told` returns the beams' outputs.
        """
        self._count(verdict)
        self.levels.extend(verdict.levels)
        self._kinds.extend(map(TokenKind, verdict.kinds))
        if verdict.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self.finished = True
            self._answers = [self._answer(place, each, timings) for place, each in enumerate(verdict.hypotheses)]
        return RoundOutput((), "", verdict.num_drafted, verdict.num_accepted, timings)

    def told(self, output: RoundOutput) -> Sequence[RoundOutput]:
        """Return the outputs of all beams once the search has finished, the best one first; empty before."""
        return self._answers

    def _answer(self, place: int, hypothesis: tpb.Hypothesis, timings: OutputTimings) -> RoundOutput:
        ids, stop_id = list(hypothesis.ids), hypothesis.stop_token_id if hypothesis.HasField("stop_token_id") else None
        detokenizer = detokenizer_of(self.request, self._tokenizer)
        keeps_all = stop_id is None or self.request.keeps_stop
        pushed = detokenizer.push(ids if keeps_all else ids[:-1])
        text = pushed.text_delta + detokenizer.finish()[0]
        shown = [*pushed.tokens, *([] if keeps_all else [("", detokenizer.num_chars)])]
        usage = self._usage_of(place)
        usage.num_completion_tokens = len(ids)
        return RoundOutput(
            tokens=tuple(
                OutputToken(token_id, kind, *each)
                for token_id, kind, each in zip(ids, self._kinds, shown, strict=False)
            ),
            text_delta=text,
            num_drafted=usage.num_draft_tokens,
            num_accepted=usage.num_accepted_tokens,
            timings=timings,
            finish_reason=FinishReason.LENGTH if stop_id is None else FinishReason.STOP,
            stop_reason=stop_id if stop_id in self.request.params.stop_token_ids else None,
            usage=usage,
            beam=place,
            score=hypothesis.score,
        )

    def _usage_of(self, place: int) -> AnswerUsage:
        """The rounds of all beams are counted for the best one."""
        if not place:
            return self.usage
        usage = AnswerUsage(
            num_prompt_tokens=self.usage.num_prompt_tokens,
            seed=self.usage.seed,
            num_cached_prompt_tokens=self.usage.num_cached_prompt_tokens,
        )
        current_record().usages.append(usage)
        return usage
