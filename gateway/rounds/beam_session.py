"""Holds the state of a beam search: its levels, and at the end one output for each beam. No I/O.

The decode loop owns it, as it owns the `Session` of a choice without beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation import ChoiceUsage, FinishReason, GenerationRequest, OutputTimings, OutputToken, RoundOutput
from gateway.rounds.detokenizer import detokenizer_of
from gateway.rounds.session import Session
from gateway.telemetry.request_record import current_record
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.kinds import TokenKind


class BeamSession(Session):
    """State of a beam search. Its committed tokens are levels: a level holds the tokens of all beams at one position.

    A worker's slot is opened with the prompt alone; then it gets the levels so far. Until the search is over, no beam
    has a final text. At the end of the search all outputs are returned, the best first.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, slot_id: int) -> None:
        super().__init__(request, tokenizer, slot_id)
        self.levels: list[pb.BeamLevel] = []
        self._kinds: list[TokenKind] = []
        """Kind of the tokens of each level, such as accepted or bonus."""
        self._outputs: list[RoundOutput] = []
        """Outputs of the beams, empty until the search is over."""

    @property
    def committed_len(self) -> int:
        return self.num_prompt + len(self.levels)

    @property
    def num_output(self) -> int:
        return len(self.levels)

    def resumed(self, agreed_len: int) -> dict[str, Any]:
        return {"base_len": self.num_prompt, "levels": self.levels}

    def fields_after(self, agreed_len: int) -> dict[str, Any]:
        return {"base_len": agreed_len, "levels": self.levels[agreed_len - self.num_prompt :]}

    def num_committed_by(self, verdict: tpb.Verdict) -> int:
        return len(verdict.levels)

    def apply(self, verdict: tpb.Verdict, timings: OutputTimings) -> RoundOutput:
        """Commit the levels of a verdict: the tokens of all beams at the next positions.

        The returned output holds only the counts and timings of the round. `visible_outputs` returns the beams'
        outputs.
        """
        self._count(verdict)
        self.levels.extend(verdict.levels)
        self._kinds.extend(map(TokenKind, verdict.kinds))
        if verdict.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self.is_finished = True
            for rank, hypothesis in enumerate(verdict.hypotheses):
                self._outputs.append(self._output_of(rank, hypothesis, timings))
        return RoundOutput((), "", verdict.num_drafted, verdict.num_accepted, timings)

    def visible_outputs(self, output: RoundOutput) -> Sequence[RoundOutput]:
        """Return the outputs of all beams, the best one first; empty until the search has finished."""
        return self._outputs

    def _output_of(self, rank: int, hypothesis: tpb.Hypothesis, timings: OutputTimings) -> RoundOutput:
        ids = list(hypothesis.ids)
        finish_reason = FinishReason.LENGTH
        stop_id: int | None = None
        if hypothesis.HasField("stop_token_id"):
            finish_reason = FinishReason.STOP
            stop_id = hypothesis.stop_token_id
        stop_reason: int | None = None
        if stop_id in self.request.params.stop_token_ids:
            stop_reason = stop_id

        detokenizer = detokenizer_of(self.request, self._tokenizer)
        shows_all = stop_id is None or self.request.keeps_stop
        text_ids = ids
        if not shows_all:
            text_ids = ids[:-1]
        pushed = detokenizer.push(text_ids)
        text = pushed.text_delta + detokenizer.finish()[0]
        token_texts = list(pushed.tokens)
        if not shows_all:
            token_texts.append(("", detokenizer.num_chars))

        tokens = list[OutputToken]()
        for token_id, kind, (token_text, offset) in zip(ids, self._kinds, token_texts, strict=False):
            tokens.append(OutputToken(token_id, kind, token_text, offset))
        usage = self._usage_of(rank)
        usage.num_completion_tokens = len(ids)
        return RoundOutput(
            tokens=tuple(tokens),
            text_delta=text,
            num_drafted=usage.num_draft_tokens,
            num_accepted=usage.num_accepted_tokens,
            timings=timings,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            usage=usage,
            beam=rank,
            score=hypothesis.score,
        )

    def _usage_of(self, rank: int) -> ChoiceUsage:
        # The rounds of all beams are counted for the best one.
        if rank == 0:
            return self.usage
        usage = ChoiceUsage(
            num_prompt_tokens=self.usage.num_prompt_tokens,
            seed=self.usage.seed,
            num_cached_prompt_tokens=self.usage.num_cached_prompt_tokens,
        )
        current_record().usages.append(usage)
        return usage
