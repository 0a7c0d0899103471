"""What makes a fuzzed message reach far: slots that are open, epochs that are right, tickets that are waited for."""

import json
import math
from typing import Any

import torch
from hypothesis import strategies as st

from outrider.engine.heads.projection import Projection, ProjectionSpec, digest_of
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.protocol import PROTOCOL
from outrider.wire.requests.params import MAX_CORPUS_ID_BYTES
from outrider.wire.requests.scheduling import MAX_CALLER_BYTES
from tests.fuzz.values import Draw, Hints, floats, int32s

VOCAB = 320
SENTINEL = 77_777
"""Slot, or id, of the valid request at the end of each stream."""
HEAD = Projection(ProjectionSpec((0, 2), 4), {"fc": torch.ones(4, 2 * 32)}).to_bytes()
"""A projection that the fuzzed target can run."""
HEAD_DIGEST = digest_of(HEAD)
LAST_DIGEST = b"last"
"""Of no head: it is refused."""
UNDISTURBED = 9
"""Slot and ticket of a lease that is verified beside what is drawn."""
_SLOT = st.sampled_from([1, 1, 2, 2, 3, 4, 0, 2**64 - 1])
_TICKET = st.sampled_from([1, 1, 2, 3, 4, 0, 2**64 - 1])
_ID = st.integers(0, VOCAB - 1)
_IDS = st.one_of(
    st.lists(_ID, max_size=4),
    st.sampled_from([[5, 6, 7], [5, 6, 7, 8, 9], [11] * 40, [11] * 255, [11] * 256, [11] * 400, [VOCAB], [2**32 - 1]]),
)
_LEN = st.one_of(st.integers(0, 12), st.sampled_from([3, 3, 255, 256, 2**32 - 1]))
_K = st.sampled_from([0, 1, 2, 2, 3, 5, 64, 65, 2**32 - 1])
_UNTIL = st.one_of(st.integers(0, 12), st.sampled_from([5, 6, 40, 256, 2**31, 2**32 - 1]))
_KIND = st.sampled_from([*tpb.NodeKind.values(), 9, 255])
_FAR = st.sampled_from([-2, -(2**31), 3, 4, 255, 2**31 - 1])
_RAW = st.one_of(st.sampled_from([b"", bytes(3), bytes(1024), bytes(1028), b"\xff" * 2000]), st.binary(max_size=17))
"""Bytes of any length."""
_DRAFTER = st.sampled_from(["", "", "ngram", "lookup", "bigram", "ngram&&model"])
_PARAMS = st.builds(
    lambda max_tokens, temperature, top_p: pb.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, ignore_eos=True
    ),
    st.sampled_from([1, 3, 16, 200]),
    st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    st.sampled_from([1.0, 0.9]),
)
_DIGEST = st.sampled_from([HEAD_DIGEST] * 3 + [b"", b"\0" * 32, b"\0" * 33])
_ROOT = st.sampled_from([4, 4, 4, 3, 5, 6])
_SPECULATION = st.sampled_from(
    [
        pb.Speculation(),
        pb.Speculation(max_draft_tokens=8),
        pb.Speculation(max_draft_tokens=3, num_draft_tokens=pb.NumDraftTokens(number=3), explain=True),
        pb.Speculation(max_draft_tokens=8, num_draft_tokens=pb.NumDraftTokens(number=2), is_sequential=True),
        pb.Speculation(max_draft_tokens=8, tree=pb.TreeShape(widths=[2, 1])),
        pb.Speculation(max_draft_tokens=8, draft_logprobs=pb.DRAFT_LOGPROBS_TOPK, draft_topk=5),
    ]
)

_SCHEDULING = st.builds(
    lambda caller, weight, priority, max_tpot_ms: pb.Scheduling(
        caller=caller, weight=weight, priority=priority, max_tpot_ms=max_tpot_ms
    ),
    st.sampled_from([b"", b"a", b"b" * MAX_CALLER_BYTES]),
    st.sampled_from([0.0, 0.25, 1.0, 1000.0]),
    st.sampled_from([-(2**31), 0, 0, 7]),
    st.sampled_from([0.0, 0.0, 0.001, 50.0]),
)


def _int32s(values: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    return st.lists(values, max_size=4).map(int32s)


def worker_hints(epoch: int, target_address: list[str]) -> Hints:
    """For items of Control and Deliver. One in ten has another epoch."""
    epochs = st.sampled_from([epoch] * 9 + [0, epoch ^ 1])
    hints: dict[str, st.SearchStrategy[Any]] = {
        "OpenSlot.committed_ids": _IDS,
        "OpenSlot.num_prompt_tokens": st.sampled_from([1, 1, 2, 3, 3, 5, 40, 0, 2**32 - 1]),
        "OpenSlot.target_address": st.sampled_from(target_address),
        "OpenSlot.target_epoch": epochs,
        "Delivery.ids": st.one_of(_int32s(_ID), _int32s(st.sampled_from([VOCAB, -1, 2**31 - 1])), _RAW),
        "Delivery.root_len": _LEN,
        "Delivery.target_epoch": epochs,
        "Delivery.distributions": _distributions(),
        "Delivery.parents": st.one_of(_int32s(st.integers(-1, 3)), _int32s(_FAR), _RAW),
        "Delivery.ranks": st.one_of(st.binary(max_size=4), _RAW),
        "Delivery.kinds": st.one_of(st.lists(_KIND, max_size=4).map(bytes), _RAW),
        "Delivery.ends": st.one_of(_int32s(st.integers(-1, 3)), _int32s(_FAR), _RAW),
        "HeadSpec.digest": _DIGEST,
        "HeadSpec.num_bytes": st.sampled_from([0, 1, 8, 2**30, 2**30 + 1, 2**64 - 1]),
        "HeadWeights.digest": _DIGEST,
        "HeadWeights.offset": st.sampled_from([0, 0, 0, 4, 2**64 - 1]),
        "HeadWeights.data": st.sampled_from([b"", b"x", bytes(8), bytes(4096)]),
        "FeatureRequest.digest": _DIGEST,
        "FeatureRequest.start": _LEN,
        "ProbeRequest.token_ids": _IDS,
        "ProbeRequest.taps": st.lists(st.sampled_from([-1, 0, 1, 2, 3, -2, 2**31 - 1, -(2**31)]), max_size=17),
        "TreeShape.widths": st.lists(st.sampled_from([1, 2, 3, 0, 64, 2**32 - 1]), max_size=4),
        "TreeShape.num_nodes": st.sampled_from([0, 0, 1, 5, 64, 2**32 - 1]),
        "TreeShape.max_depth": st.sampled_from([0, 1, 3, 64, 2**32 - 1]),
        "Verify.lease_end_len": _UNTIL,
        "Extend.lease_end_len": _UNTIL,
        "NumDraftTokens.number": _K,
        "Speculation.max_draft_tokens": _K,
        "Speculation.draft_topk": st.sampled_from([0, 0, 1, 5, VOCAB, VOCAB + 1, 2**32 - 1]),
        "OpenSlot.protocol": st.sampled_from([PROTOCOL] * 8 + [0, PROTOCOL + 1, 2**32 - 1]),
        "OpenSlot.drafter": _DRAFTER,
        "OpenSlot.corpus_id": st.sampled_from([b"", b"a", bytes(MAX_CORPUS_ID_BYTES), bytes(MAX_CORPUS_ID_BYTES + 1)]),
        "Scheduling.caller": st.sampled_from([b"", b"a", b"b" * MAX_CALLER_BYTES, b"c" * (MAX_CALLER_BYTES + 1)]),
        "Scheduling.weight": st.sampled_from([0.0, 1.0, 1.0, 0.25, 1000.0, 1001.0, -1.0, math.nan, math.inf]),
        "Scheduling.max_tpot_ms": st.sampled_from([0.0, 0.0, 0.001, 50.0, 3.7e6, -1.0, math.nan, math.inf]),
        "OpenSlot.num_prompt_logprobs": st.sampled_from([0, 1, 3, 20, 21, 2**32 - 1]),
    }
    for kind in ("OpenSlot", "Verify", "Extend", "Advance", "Truncate", "CloseSlot"):
        hints[f"{kind}.slot"] = _SLOT
    for kind in ("Verify", "Advance"):
        hints |= {f"{kind}.base_len": _LEN, f"{kind}.committed_ids": _IDS}
    for kind in ("HeadSpec", "FeatureRequest", "ProbeRequest"):
        hints[f"{kind}.target_epoch"] = epochs
    for kind in ("Verify", "Extend", "Advance", "Delivery", "FeatureRequest"):
        hints[f"{kind}.ticket"] = _TICKET
    for kind in ("TargetRequest", "DraftRequest"):
        hints |= {f"{kind}.epoch": epochs, f"{kind}.id": st.integers(0, 50)}
    return hints


def valid_item(draw: Draw, request: type[Any], epoch: int, target_address: str) -> Any:
    """An item of a small story: three slots of three committed tokens each, opened, asked, let on, cut and closed."""
    slot = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["open", "open", "ask", "ask", "ask", "extend", "truncate", "close"]))
    item = request(id=slot, epoch=epoch)
    if kind == "open":
        opened = pb.OpenSlot(slot=slot, committed_ids=[5, 6, 7], num_prompt_tokens=3, params=draw(_PARAMS))
        opened.target_address, opened.target_epoch, opened.protocol = target_address, epoch, PROTOCOL
        opened.drafter = draw(st.sampled_from(["", "ngram", "lookup"]))
        opened.speculation.CopyFrom(draw(_SPECULATION))
        opened.scheduling.CopyFrom(draw(_SCHEDULING))
        if draw(st.booleans()):
            opened.num_prompt_logprobs = 2
        item.open.CopyFrom(opened)
    elif kind == "truncate":
        item.truncate.CopyFrom(pb.Truncate(slot=slot, committed_len=3, reason=draw(st.integers(0, 3))))
    elif kind == "close":
        item.close.CopyFrom(pb.CloseSlot(slot=slot))
    elif request is not tpb.TargetRequest:
        ids = [11] * draw(st.integers(0, 2))
        item.advance.CopyFrom(dpb.Advance(slot=slot, ticket=draw(st.integers(1, 4)), base_len=3, committed_ids=ids))
    elif kind == "extend":
        item.extend.CopyFrom(
            tpb.Extend(slot=slot, ticket=draw(st.integers(1, 4)), lease_end_len=draw(st.integers(4, 8)))
        )
    else:
        ids = [11] * draw(st.integers(0, 2))
        ask = tpb.Verify(slot=slot, base_len=3, committed_ids=ids)
        ask.lease_end_len = 3 + len(ids) + draw(st.sampled_from([1, 1, 2, 4]))
        ask.tickets.add(ticket=draw(st.integers(1, 4)), is_drafted=draw(st.booleans()))
        tickets = st.builds(tpb.DraftTicket, ticket=st.integers(1, 9), is_drafted=st.booleans())
        ask.tickets.extend(draw(st.lists(tickets, max_size=9)))
        item.verify.CopyFrom(ask)
    return item


def leases(draw: Draw, epoch: int) -> list[tpb.TargetRequest]:
    """Four slots of four committed tokens after a step, each with a lease of its own number. The last takes what
    `sound_part` delivers, whatever that costs on this machine: nothing that is drawn names it.
    """
    items = list[tpb.TargetRequest]()
    for slot in (1, 2, 3, UNDISTURBED):
        opened = pb.OpenSlot(slot=slot, committed_ids=[5, 6, 7], num_prompt_tokens=3, protocol=PROTOCOL)
        if slot == UNDISTURBED:
            opened.params.max_tokens, opened.params.ignore_eos = 16, True
            opened.speculation.max_draft_tokens = opened.speculation.num_draft_tokens.number = 2
        else:
            opened.params.CopyFrom(draw(_PARAMS))
            opened.speculation.CopyFrom(draw(_SPECULATION))
        items.append(tpb.TargetRequest(id=slot, epoch=epoch, open=opened))
        ask = tpb.Verify(slot=slot, tickets=[tpb.DraftTicket(ticket=slot)], base_len=3, lease_end_len=4)
        items.append(tpb.TargetRequest(id=slot + 10, epoch=epoch, verify=ask))
    return items


def sound_part(ticket: int, epoch: int) -> tpb.Delivery:
    """Guesses that a lease of `leases` can verify."""
    part = tpb.Delivery(ticket=ticket, target_epoch=epoch, root_len=4, ids=int32s([5, 6]), parents=int32s([-1, 0]))
    part.ranks, part.kinds = bytes(2), bytes([tpb.NODE_KIND_DETERMINISTIC] * 2)
    return part


def valid_part(draw: Draw, epoch: int) -> tpb.Delivery:
    """A tree after three to six committed tokens, perhaps behind nodes that came before."""
    num_known, num = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    ids = [11] * num_known + draw(st.lists(_ID, min_size=num, max_size=num))
    parents = [draw(st.sampled_from([node - 1, draw(st.integers(-1, node - 1))])) for node in range(len(ids))]
    kinds = [tpb.NODE_KIND_REFERENCE] * num_known
    one = draw(st.sampled_from([tpb.NODE_KIND_DETERMINISTIC, tpb.NODE_KIND_SAMPLED, None]))
    kinds += [draw(st.sampled_from(tpb.NodeKind.values()[1:])) if one is None else one for _ in range(num)]
    part = tpb.Delivery(ticket=draw(st.integers(1, 4)), target_epoch=epoch, root_len=draw(_ROOT))
    part.ids, part.parents, part.kinds = int32s(ids), int32s(parents), bytes(kinds)
    part.ranks = bytes(draw(st.integers(0, 2)) for _ in ids)
    part.ends = int32s(draw(st.lists(st.integers(-1, len(ids) - 1), max_size=2 if ids else 1)))
    num_rows = len({parent for parent, kind in zip(parents, kinds, strict=True) if kind == tpb.NODE_KIND_SAMPLED})
    if num_rows:
        rows = floats([-math.log(VOCAB)] * VOCAB) * num_rows
        part.distributions.vocab_size = VOCAB
        part.distributions.dense.CopyFrom(pb.Tensor(dtype=1, shape=[num_rows, VOCAB], data=rows))
    return part


def registration(epoch: int) -> list[tpb.HeadRequest]:
    """What registers a head, its weights in two pieces."""
    spec = tpb.HeadSpec(target_epoch=epoch, digest=HEAD_DIGEST, num_bytes=len(HEAD))
    pieces = [
        tpb.HeadWeights(digest=HEAD_DIGEST, offset=at, data=HEAD[at : at + 400]) for at in range(0, len(HEAD), 400)
    ]
    return [tpb.HeadRequest(head=spec), *(tpb.HeadRequest(weights=piece) for piece in pieces)]


def last_asks(epoch: int) -> list[tpb.HeadRequest]:
    """What can be served of `leases`, and a head that is refused in any case."""
    named = {"target_epoch": epoch, "digest": HEAD_DIGEST}
    rows = [tpb.HeadRequest(features=tpb.FeatureRequest(ticket=ticket, start=0, **named)) for ticket in range(1, 4)]
    return [*rows, tpb.HeadRequest(head=tpb.HeadSpec(target_epoch=epoch, digest=LAST_DIGEST))]


def valid_ask(draw: Draw, epoch: int) -> tpb.HeadRequest:
    """What a draft with a head asks for: to register it, a piece of it, or rows of a lease."""
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(registration(epoch)))
    ticket, start = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 3, 9]))
    rows = tpb.FeatureRequest(target_epoch=epoch, ticket=ticket, digest=HEAD_DIGEST, start=start)
    return tpb.HeadRequest(features=rows)


def valid_probe(draw: Draw, epoch: int) -> tpb.ProbeRequest:
    ids, taps = draw(st.lists(_ID, min_size=1, max_size=9)), draw(st.lists(st.integers(-1, 2), min_size=1, max_size=3))
    return tpb.ProbeRequest(target_epoch=epoch, token_ids=ids, taps=taps)


@st.composite
def _distributions(draw: Any) -> pb.TokenDistributions:
    """Rows of the right form, with values that may be none: NaN, positive, not normalised, ids out of range."""
    num_rows = draw(st.integers(0, 4))
    value = st.sampled_from([0.0, -1.0, -math.inf, math.nan, 1.0, 1e38, -math.log(VOCAB)])
    vocab = draw(st.sampled_from([VOCAB] * 5 + [0, VOCAB - 1, 2**32 - 1]))
    if draw(st.booleans()):
        shape = [num_rows, draw(st.sampled_from([VOCAB] * 5 + [1, 2**32 - 1]))]
        row = floats([draw(value)] + [-math.log(VOCAB)] * (VOCAB - 1))
        dense = pb.Tensor(dtype=draw(st.sampled_from([1, 1, 1, 2, 0])), shape=shape, data=row * num_rows)
        return pb.TokenDistributions(vocab_size=vocab, dense=dense)
    sizes = [draw(st.sampled_from([1, 2, 3, 0, VOCAB, 2**32 - 1])) for _ in range(num_rows)]
    total = sum(size for size in sizes if size < 1000)
    ids = b"".join(draw(st.sampled_from([i, i, 0, VOCAB, 2**31])).to_bytes(4, "little") for i in range(min(total, 12)))
    ids += bytes(4 * max(0, total - 12))
    logs = floats([draw(value) for _ in range(min(total, 12))] + [-1.0] * max(0, total - 12))
    return pb.TokenDistributions(
        vocab_size=vocab,
        sparse_ids=pb.Tensor(dtype=2, shape=[total], data=ids),
        sparse_logprobs=pb.Tensor(dtype=1, shape=[total], data=logs),
        support_sizes=sizes,
    )


def structured_hints() -> Hints:
    """For what an answer has to be: from what is fine to what would take for ever."""
    return {
        "StructuredOutputs.json": st.one_of(_schemas().map(_json), st.sampled_from(["", "{", "null", "[" * 9000])),
        "StructuredOutputs.regex": _expressions(),
        "StructuredOutputs.grammar": st.one_of(
            _expressions().map(lambda text: f"start: A{{1,3}}\nA: /{text}/"),
            _expressions().map(lambda text: f'root ::= "{text}" ([a-z] | root)*'),
            _schemas().map(lambda schema: f"start: %json {_json(schema)}"),
            st.text('srt: "|&~/%json{}()[]<>@*+\\\n', max_size=40).map(lambda text: f"start: {text}"),
        ),
        "Choices.texts": st.lists(st.sampled_from(["", "a", "é😀", "\0", "\\", "a" * 9000]), max_size=3)
        | st.integers(1000, 1030).map(lambda count: [f"c{each}" for each in range(count)]),
    }


def _json(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _expressions() -> st.SearchStrategy[str]:
    """Parts that are fine alone, many times in each other."""
    part = st.sampled_from(
        ["a", ".*", "(a|aa)", "[^b]", r"\p{L}", r"\d", "x?", "é", "(?=a)", r"\b", "(", "[", "\\", "/"]
    )
    repeat = st.sampled_from(["", "*", "+", "?", "{1,100}", "{0,9999}", "{1000000}"])
    wrapped = st.tuples(st.lists(st.tuples(part, repeat).map("".join), max_size=6).map("".join), repeat)
    return st.builds(
        lambda inner, depth, count: ("(" * depth + inner[0] + f"){inner[1]}" * depth) * count,
        wrapped,
        st.sampled_from([0, 0, 1, 3, 200]),
        st.sampled_from([0, 1, 1, 2, 300]),
    )


def _schemas() -> st.SearchStrategy[Any]:
    """Of every keyword, with values of the right form and of any, in each other and many beside each other."""
    number = st.sampled_from([-1, 0, 0.5, 1, 2, 3.7, 2**53, 2**60, 1e300, 4294967291, 10_000, 10**9])
    count = st.sampled_from([0, 1, 2, 31, 10_000, 10_001, -1, 1.5])
    names = st.lists(st.sampled_from(["a", "b", "é", "a b", "$ref", ""]), max_size=4)
    plain: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(
            ["object", "array", "string", "number", "integer", "null", "any", ["string", "null"], []]
        ),
        "enum": st.lists(st.sampled_from([None, True, 1, 2.5, "a", [], {"a": [1]}, 10**30]), max_size=4)
        | st.integers(900, 1100).map(lambda many: [f"e{each}" for each in range(many)]),
        "const": st.sampled_from([None, "a", [[[]]], {"a": 1}]),
        "pattern": _expressions(),
        "format": st.sampled_from(["date", "email", "ipv6", "int32"]),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/anyOf/0", "#a", "http://a", ""]),
        "required": names,
        "uniqueItems": st.booleans(),
        "unknown": st.none(),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), number),
        **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"), count),
    }

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        many = st.tuples(inner, st.sampled_from([1, 1, 2, 12, 300])).map(lambda made: [made[0]] * made[1])
        some = st.lists(inner, max_size=3)
        maps = st.dictionaries(st.sampled_from(["a", "b", "^x", "(a|b)*"]), inner, max_size=3)
        wide = st.tuples(inner, st.sampled_from([30, 600])).map(lambda made: {f"p{i}": made[0] for i in range(made[1])})
        nested: dict[str, st.SearchStrategy[Any]] = {
            "items": inner,
            "additionalProperties": inner,
            "properties": maps | wide,
            "patternProperties": maps,
            "$defs": maps,
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), some | many),
        }
        return _some_of(plain | nested)

    leaf = st.one_of(st.booleans(), _some_of(plain), st.just(5))
    return st.recursive(leaf, around, max_leaves=12)


def _some_of(keywords: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Few at once: with many of them nearly every schema is refused at once."""
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: keywords[key] for key in keys}))
