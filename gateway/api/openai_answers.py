"""Serves /v1/completions and /v1/chat/completions: runs a request's choices, and responds at once or with a stream.

`gateway.api.routes` creates an OpenAIAnswer for each request. The writers in `openai_responses.py` write its choices.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from gateway.admission.admission import Admission, IncomingRequest
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.api.http_io import DONE, JsonResponse, event
from gateway.api.logprobs import PromptFields
from gateway.api.openai_responses import ChatWriter, CompletionWriter, join_outputs, mean_logprob, with_prompt_logprobs
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.usage import Json, Step, acceptance_of, usage_of, usage_so_far
from gateway.generation import ChoiceUsage, GenerationRequest, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.workers.drafts.draft_limits import requested_speculation

INLINE_ENTRIES = 1000
"""Maximal number of tokens and log-probs in a response whose JSON is made on the event loop, in about 5 ms. The JSON of
a response with more is made on a thread."""


@dataclass(frozen=True, slots=True)
class OpenAIAnswer:
    """Runs one request of /v1/completions or /v1/chat/completions.

    Await `whole` for a response in one piece, or iterate over `events` for a stream.
    """

    admission: Admission
    body: CompletionBody | ChatBody
    unchecked: UncheckedRequest
    incoming: IncomingRequest

    async def whole(self) -> JsonResponse:
        """Run the request to its end, and return the response with all choices."""
        async with self.admission.answers(self.unchecked, self.incoming) as answers:
            writer = await self._create_writer(answers.requests)
            rounds: list[list[RoundOutput]] = [[] for _ in answers.requests]
            async for index, output in answers.stream():
                rounds[index].append(output)
        if self._is_small(answers.requests, rounds):
            return self._response(answers.requests, writer, rounds)
        # There may be hundreds of thousands of entries: no other request waits for their JSON.
        return await asyncio.to_thread(self._response, answers.requests, writer, rounds)

    def _is_small(self, requests: tuple[GenerationRequest, ...], rounds: Sequence[Sequence[RoundOutput]]) -> bool:
        if self.unchecked.num_prompt_logprobs is not None:
            return False
        num_tokens = 0
        for outputs in rounds:
            num_tokens += sum(len(output.tokens) for output in outputs)
        num_entries = (1 + (self.unchecked.params.num_logprobs or 0)) * num_tokens
        if self.body.return_token_ids:
            num_entries += sum(len(request.caller_prompt_ids) for request in requests)
        return num_entries <= INLINE_ENTRIES

    def _response(
        self,
        requests: tuple[GenerationRequest, ...],
        writer: CompletionWriter | ChatWriter,
        rounds: Sequence[Sequence[RoundOutput]],
    ) -> JsonResponse:
        answer = self._head(requests, writer.object)
        outputs = with_prompt_logprobs([join_outputs(outputs) for outputs in rounds], self.unchecked.num_choices)
        usages = [output.usage for output in outputs if output.usage is not None]
        choices = []
        for position, index in enumerate(self._returned(outputs)):
            choices.append(writer.choice(index, outputs[index]) | {"index": position})
        answer |= writer.answer_fields(0, outputs[0])
        usage = usage_of(usages, self.unchecked.num_choices, writer.num_reasoning_tokens)
        steps = [(output.num_drafted, output.num_accepted) for output in rounds[0]]
        return JsonResponse({**answer, "choices": choices, "usage": usage, "metrics": self._metrics(requests, steps)})

    def _returned(self, outputs: Sequence[RoundOutput]) -> Sequence[int]:
        if isinstance(self.body, CompletionBody):
            return best_of(outputs, self.unchecked.num_choices, self.body.n or 1)
        return range(len(outputs))

    async def events(self) -> AsyncGenerator[bytes]:
        """Run the request, and yield server-sent events in bytes.

        The first item is empty: with it the status is sent. Then there is an event for each round of each choice,
        except for rounds that add nothing to the response. The last events are the usage, if the client asks for it,
        and `[DONE]`.
        """
        usages: dict[int, ChoiceUsage] = {}
        steps: list[Step] = []
        num_tokens: Counter[int] = Counter()
        begun: set[int] = set()  # choices that have an output
        async with self.admission.answers(self.unchecked, self.incoming) as answers:
            writer = await self._create_writer(answers.requests)
            head = self._head(answers.requests, writer.chunk_object)
            if self.body.include_usage:
                head["usage"] = None
            await self.admission.wait_for_slot(answers)
            yield b""  # the status
            async for index, output in answers.stream():
                first = index not in begun
                begun.add(index)
                steps.append((output.num_drafted, output.num_accepted))
                num_tokens[index] += len(output.tokens)
                if output.usage is not None:
                    usages[index] = output.usage
                if output.prompt_logprobs is None:
                    chunk = writer.chunk(index, output, first)
                else:
                    chunk = await asyncio.to_thread(writer.chunk, index, output, first)
                if chunk is None:
                    continue
                if self.body.continuous_usage:
                    head["usage"] = usage_so_far(len(answers.requests[index].caller_prompt_ids), num_tokens[index])
                fields = writer.answer_fields(index, output) if first else {}
                yield event({**head, **fields, "choices": [chunk]})
        if self.body.include_usage:
            in_order = [usages[index] for index in sorted(usages)]
            usage = usage_of(in_order, self.unchecked.num_choices, writer.num_reasoning_tokens)
            metrics = self._metrics(answers.requests, steps)
            yield event({**head, "choices": [], "usage": usage, "metrics": metrics})
        yield DONE

    def _metrics(self, requests: tuple[GenerationRequest, ...], steps: list[Step]) -> Json:
        """vLLM's. Only of a request with one choice: else it would not be clear whose steps are counted."""
        acceptance = None
        num_spec_tokens = requested_speculation(requests[0], self.admission.config).max_depth
        if len(requests) == 1 and requests[0].params.beams is None and num_spec_tokens:
            with_drafts = [step for step in steps if step[0]]
            acceptance = acceptance_of(with_drafts, num_spec_tokens, self.body.detailed_metrics)
        return {"speculative_decoding": acceptance}

    async def _create_writer(self, requests: tuple[GenerationRequest, ...]) -> CompletionWriter | ChatWriter:
        body = self.body
        tokenizer = self.admission.generator.tokenizer(requests[0].model)
        if isinstance(body, ChatBody):
            readings = [request.reading for request in requests]
            prompts = self._prompt_fields(tokenizer, requests, None)
            return ChatWriter(tokenizer, bool(body.logprobs), readings, body.token_kinds, prompts)
        echoes: list[str] = []
        if body.echo:
            echoes = await self._echoes(tokenizer, requests)
        prompts = self._prompt_fields(tokenizer, requests, body.num_echoed_logprobs)
        return CompletionWriter(tokenizer, body.logprobs is not None, echoes, body.token_kinds, prompts)

    async def _echoes(self, tokenizer: Tokenizer, requests: tuple[GenerationRequest, ...]) -> list[str]:
        """Return the text of the prompt of each choice."""
        skips_special = self.body.skip_special_tokens is not False
        prompts = [request.caller_prompt_ids for request in requests[:: self.unchecked.num_choices]]

        def decode() -> list[str]:
            return [tokenizer.decode(ids, skips_special) for ids in prompts]

        echoes = []
        for text in await asyncio.to_thread(decode):
            echoes += [text] * self.unchecked.num_choices
        return echoes

    def _prompt_fields(
        self, tokenizer: Tokenizer, requests: tuple[GenerationRequest, ...], num_echoed: int | None
    ) -> PromptFields | None:
        if not self.body.return_token_ids and self.body.prompt_logprobs is None and num_echoed is None:
            return None
        token_ids = bool(self.body.return_token_ids)
        return PromptFields(tokenizer, requests, token_ids, self.body.prompt_logprobs, num_echoed)

    def _head(self, requests: tuple[GenerationRequest, ...], kind: str) -> Json:
        return {
            "id": self.unchecked.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": requests[0].model,
            "system_fingerprint": None,
        }


def best_of(outputs: Sequence[RoundOutput], num_made: int, num_returned: int) -> list[int]:
    """Return the indices in `outputs` of each prompt's `num_returned` outputs with the highest mean log-probs, the best
    first. If `num_returned` is `num_made`, return all indices in ascending order.

    outputs: whole outputs of all prompts, `num_made` consecutive ones for each prompt.
    """
    # num_made 4, num_returned 2: two of the indices 0 to 3, then two of 4 to 7
    if num_returned == num_made:
        return list(range(len(outputs)))
    kept: list[int] = []
    for first in range(0, len(outputs), num_made):
        made = range(first, first + num_made)
        kept += sorted(made, key=lambda index: mean_logprob(outputs[index]), reverse=True)[:num_returned]
    return kept
