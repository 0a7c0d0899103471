"""The field `speculation` of a response: the kinds of its output tokens, and its explained rounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.api.schemas.answers.base import AnswerModel


class TokenOfKind(AnswerModel):
    id: int
    text: str
    kind: Literal["accepted", "recovered", "bonus", "plain", "forced", "predicted"]


class DraftToken(AnswerModel):
    id: int
    text: str
    parent: int = Field(description="Index of the draft token that it follows; -1 = the last committed token.")
    accepted: bool
    kind: Literal["drawn", "guess", "forced", "predicted"]


class NamedToken(AnswerModel):
    id: int
    text: str


class RankedToken(NamedToken):
    logprob: float


class Rejection(AnswerModel):
    parent: int = Field(description="Index of the last accepted draft token; -1 = none was.")
    token: NamedToken = Field(description="The token that the target chose instead.")
    target: list[RankedToken] = Field(description="The most likely of the distribution that it draws from, at most 5.")
    draft_law: list[RankedToken] | None = Field(
        description="The most likely of the distribution that the draft drew from, at most 5."
    )
    draft_guesses: list[NamedToken] | None = Field(description="Where nothing was drawn; at most 5.")


class RoundTimings(AnswerModel):
    total_us: int
    hold_us: int
    queue_us: int
    forward_us: int
    accept_us: int
    other_us: int
    draft_us: int | None = Field(description="Of the draft's steps, in addition to all these; null = unknown.")


class Round(AnswerModel):
    committed_len: int = Field(description="Tokens of prompt and output before it.")
    drafter: str | None = Field(description="null for a plain step.")
    num_drafted: int
    num_accepted: int
    batch_size: int
    draft: list[DraftToken] = Field(description="What was verified, parents before their children.")
    rejection: Rejection | None = Field(description="null where all was kept, and where the answer ended before.")
    timings: RoundTimings


class ChoiceSpeculation(AnswerModel):
    tokens: list[TokenOfKind]
    round: Round | None = Field(default=None, description="With speculation.explain, of a stream.")
