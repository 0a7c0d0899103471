"""The field `speculation` of generating requests: how their draft tokens are made and accepted."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from gateway.api.schemas.base import StrictSchema, described
from gateway.generation import SpeculationOptions
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import AcceptanceRule, DraftLogprobs
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import DRAFT_TOKENS, LENIENCE, read_draft_logprobs
from outrider.wire.requests.speculation import NumDraftTokens, check_num_draft_tokens
from outrider.wire.requests.tree_shape import TreeShape


def _num_draft_tokens(value: Any) -> NumDraftTokens | None:
    if value is None:
        return None
    return check_num_draft_tokens(value, "speculation.num_draft_tokens")


class SpeculationBody(StrictSchema):
    enabled: bool | None = None
    num_draft_tokens: Annotated[
        Any, BeforeValidator(_num_draft_tokens, json_schema_input_type=NumDraftTokens | None)
    ] = described("or auto", DRAFT_TOKENS)
    draft_logprobs: str | None = described(
        "auto, full, topk or topk:N", pattern="^(auto|full|topk|topk:[1-9][0-9]{0,8})$"
    )
    acceptance: Literal["rejection", "coupled"] | None = None
    lenience: float | None = described("", LENIENCE)
    drafter: str | None = described("", enum=[*Drafter, None])
    tree: str | None = described(
        "children by depth, 4x2x1, or best:NODESxDEPTH",
        pattern="^([1-9][0-9]?(x[1-9][0-9]?){0,63}|best:[1-9][0-9]?x[1-9][0-9]?)$",
    )
    token_kinds: bool | None = described("each choice says which of its tokens were drafted. Default: false")
    explain: bool | None = described(
        "each event of a stream says what its round verified and what the target refused. Default: false"
    )
    metrics: Literal["summary", "detailed"] | None = described(
        "detailed: metrics.speculative_decoding lists every round, too"
    )

    @property
    def has_kinds(self) -> bool:
        """Whether the response contains the kind of each output token: with `token_kinds` or `explain`."""
        return bool(self.token_kinds or self.explain)

    @property
    def has_detailed_metrics(self) -> bool:
        """Whether the response's `metrics.speculative_decoding` lists every round."""
        return self.metrics == "detailed"

    def options(self) -> SpeculationOptions:
        """Return the fields converted to the gateway's SpeculationOptions.

        Raises InvalidRequest for a text that cannot be parsed, such as a tree "4x".
        """
        kind, topk = self._read_draft_logprobs()
        return SpeculationOptions(
            enabled=self.enabled is not False,
            num_draft_tokens=self.num_draft_tokens,
            draft_logprobs=kind,
            draft_topk=topk,
            acceptance=self._acceptance_rule(),
            lenience=self.lenience,
            drafter=self._drafter(),
            tree=self._tree_shape(),
            explain=bool(self.explain),
        )

    def _read_draft_logprobs(self) -> tuple[DraftLogprobs | None, int | None]:
        if self.draft_logprobs is None:
            return None, None
        try:
            return read_draft_logprobs(self.draft_logprobs)
        except ValueError as error:
            text = f"speculation.draft_logprobs is {reprlib.repr(self.draft_logprobs)}, {error}"
            raise InvalidRequest(text, param="speculation.draft_logprobs") from None

    def _acceptance_rule(self) -> AcceptanceRule | None:
        if self.acceptance is None:
            return None
        return AcceptanceRule[self.acceptance.upper()]

    def _drafter(self) -> Drafter | None:
        if self.drafter is None:
            return None
        return Drafter.parse(self.drafter, "speculation.drafter")

    def _tree_shape(self) -> TreeShape | None:
        if self.tree is None:
            return None
        return TreeShape.parse(self.tree, "speculation.tree")
