"""Holds the state of one choice: committed tokens, text, usage. No I/O.

The decode loop owns one for each choice, and applies verdicts to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.generation import (
    ChoiceUsage,
    FinishReason,
    GenerationRequest,
    OutputLogprobs,
    OutputTimings,
    OutputToken,
    RoundOutput,
)
from gateway.rounds.detokenizer import TextUpdate, detokenizer_of
from gateway.rounds.explaining import explain_round, kinds_of
from gateway.telemetry.request_record import current_record
from gateway.tokenizer import Tokenizer
from outrider.v1 import common_pb2 as pb
from outrider.v1 import gateway_pb2
from outrider.v1 import target_pb2 as tpb
from outrider.wire.protocol import PROTOCOL


class Session:
    """State of one choice between rounds: committed tokens, text and usage."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, slot_id: int) -> None:
        self.request = request
        self.slot_id = slot_id
        self.committed: list[int] = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.usage = ChoiceUsage(num_prompt_tokens=len(request.caller_prompt_ids), seed=request.params.seed)
        if request.params.lenience < 1.0:
            self.usage.lenience = request.params.lenience
        self.usage.num_rejected_prediction_tokens = len(request.prediction_ids)
        self.is_finished = False
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_of(request, tokenizer)
        self._has_prompt_logprobs = request.num_prompt_logprobs is None
        """Whether no prompt log-probs are missing: they have arrived, or the request does not ask for them."""
        current_record().usages.append(self.usage)

    @property
    def committed_len(self) -> int:
        """Number of committed tokens, including the prompt."""
        return len(self.committed)

    @property
    def num_cached(self) -> int:
        """Number of the choice's tokens in a worker's cache: committed tokens, and source tokens of an encoder."""
        return len(self.committed) + len(self.request.source_ids)

    @property
    def num_output(self) -> int:
        """Number of output tokens so far."""
        return len(self.committed) - self.num_prompt

    def max_draft_tokens(self) -> int:
        """Return the largest number of draft tokens that the next step can use.

        A step commits the draft tokens that it accepts and one token more.

        # max_tokens 10, 7 output tokens: 2, since a step that accepts both commits 3
        """
        return self.request.params.max_tokens - self.num_output - 1

    def resumed(self, agreed_len: int) -> dict[str, Any]:
        """Return the fields of a Verify message for a target that has the first `agreed_len` committed tokens.

        The fields hold the committed tokens that the target does not have yet.
        """
        return self.fields_after(agreed_len)

    def fields_after(self, agreed_len: int) -> dict[str, Any]:
        """Return the fields of an Advance message for a worker that has the first `agreed_len` committed tokens.

        The fields hold the committed tokens that the worker does not have yet.
        """
        return {"base_len": agreed_len, "committed_ids": self.committed[agreed_len:]}

    def num_committed_by(self, verdict: tpb.Verdict) -> int:
        """Return the number of tokens that a verdict commits; in a beam search, of levels."""
        return len(verdict.token_ids)

    def visible_outputs(self, output: RoundOutput) -> Sequence[RoundOutput]:
        """Return the outputs that the client gets after a round: `output` alone, or in a beam search those of all beams
        at its end, and none before.
        """
        return (output,)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely ids at each prompt position whose log-probs the target must still send.

        None once the prompt log-probs have arrived, or if the request does not ask for them.
        """
        if self._has_prompt_logprobs:
            return None
        return self.request.num_prompt_logprobs

    def open_message(self) -> pb.OpenSlot:
        """Return the OpenSlot message that opens the choice's slot on a worker, with all committed tokens."""
        return pb.OpenSlot(
            slot=self.slot_id,
            committed_ids=self.committed,
            num_prompt_tokens=self.num_prompt,
            params=self.request.params.to_proto(),
            cache_salt=self.request.cache_salt,
            corpus_id=self.request.corpus_id,
            traceparent=current_record().traceparent,
            protocol=PROTOCOL,
            source_ids=self.request.source_ids,
            scheduling=self.request.scheduling.to_proto(),
        )

    def apply(self, verdict: tpb.Verdict, timings: OutputTimings) -> RoundOutput:
        """Commit a verdict, and return the output of the round.

        A stop string may cut the verdict's tokens. `is_finished` is then set although the target would continue.

            # stop "END", a verdict with the tokens "a", " E", "ND", " b": three tokens are committed, the text is "a "
        """
        self._count(verdict)
        ids = list(verdict.token_ids)
        stopped_by_id = verdict.finish_reason == pb.FINISH_REASON_STOP
        text_ids = ids
        if stopped_by_id and not self.request.keeps_stop:  # the stop id is no text
            text_ids = ids[:-1]
        pushed = self._detokenizer.push(text_ids)
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        delta = pushed.text_delta
        if pushed.stop is not None:
            ids = ids[: pushed.num_kept]
            finish = FinishReason.STOP
            stop_reason = pushed.stop
        elif verdict.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            finish = FinishReason.LENGTH
            if stopped_by_id:
                finish = FinishReason.STOP
            held, stop_reason = self._detokenizer.finish()
            delta += held
            if stop_reason is not None:
                finish = FinishReason.STOP
            elif stopped_by_id and ids[-1] in self.request.params.stop_token_ids:
                stop_reason = ids[-1]
        self.committed.extend(ids)
        self.usage.num_completion_tokens = self.num_output
        self._count_predicted(min(verdict.num_predicted, len(ids)))
        self.is_finished = finish is not None
        prompt_logprobs = self._read_prompt_logprobs(verdict)
        if self.request.is_empty:
            self.usage.num_completion_tokens = 0
            return RoundOutput(
                (),
                "",
                0,
                0,
                timings,
                FinishReason.LENGTH,
                usage=replace(self.usage),
                prompt_logprobs=prompt_logprobs,
            )
        usage: ChoiceUsage | None = None
        if self.is_finished:
            usage = replace(self.usage)
        explanation: gateway_pb2.RoundExplanation | None = None
        if self.request.speculation.explain:
            explanation = explain_round(verdict, len(ids), self._tokenizer)
        return RoundOutput(
            tokens=self._tokens(verdict, ids, pushed),
            text_delta=delta,
            num_drafted=verdict.num_drafted,
            num_accepted=verdict.num_accepted,
            timings=timings,
            finish_reason=finish,
            stop_reason=stop_reason,
            usage=usage,
            explanation=explanation,
            prompt_logprobs=prompt_logprobs,
        )

    def _read_prompt_logprobs(self, verdict: tpb.Verdict) -> Sequence[pb.TokenLogprobs] | None:
        if self._has_prompt_logprobs:
            return None
        self._has_prompt_logprobs = True
        return verdict.prompt_logprobs

    def _count(self, verdict: tpb.Verdict) -> None:
        if self.usage.num_rounds + self.usage.num_plain_steps == 0:  # a slot that is opened again finds its own tokens
            self.usage.num_cached_prompt_tokens = min(verdict.num_cached_tokens, self.usage.num_prompt_tokens)
        if verdict.num_drafted:
            self.usage.num_rounds += 1
        else:
            self.usage.num_plain_steps += 1
        self.usage.num_draft_tokens += verdict.num_drafted
        self.usage.num_accepted_tokens += verdict.num_accepted
        for outcome in verdict.outcomes:
            self.usage.num_wasted_tokens += outcome.num_wasted

    def _count_predicted(self, num_tokens: int) -> None:
        usage = self.usage
        usage.num_accepted_prediction_tokens += num_tokens
        num_remaining = len(self.request.prediction_ids) - usage.num_accepted_prediction_tokens
        usage.num_rejected_prediction_tokens = max(0, num_remaining)  # a passage may be copied twice

    def _tokens(self, verdict: tpb.Verdict, ids: list[int], pushed: TextUpdate) -> tuple[OutputToken, ...]:
        tokens = []
        kinds = kinds_of(verdict)
        for index, token_id in enumerate(ids):
            if index < len(pushed.tokens):
                text, offset = pushed.tokens[index]
            else:  # a stop id
                text = ""
                offset = self._detokenizer.num_chars
            logprobs = None
            if verdict.logprobs:
                logprobs = OutputLogprobs.from_proto(verdict.logprobs[index])
            tokens.append(OutputToken(token_id, kinds[index], text, offset, logprobs))
        return tuple(tokens)
