"""What a message says, to the engine."""

import pytest

from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest
from target_service.servicer import verify_job

VOCAB = 3


@pytest.mark.parametrize("tickets", [[], [6, 6], [*range(10, 19)]], ids=["none", "twice", "too many"])
def test_a_lease_has_a_ticket_of_its_own_for_each_of_few_drafts(tickets: list[int]) -> None:
    message = tpb.Verify(tickets=[tpb.DraftTicket(ticket=each) for each in tickets])
    with pytest.raises(InvalidRequest, match="must have 1 to 8, each once"):
        verify_job(1, message, VOCAB, lambda result: None)
