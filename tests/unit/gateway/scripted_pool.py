"""A served model whose workers' links the test makes."""

from types import SimpleNamespace
from typing import Any, cast

from gateway.workers.drafts.reference_target import ReferenceTarget
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.membership import MemberSpec, PoolSpec
from gateway.workers.served import ServedModel, SharedServices
from outrider.v1 import common_pb2 as pb
from outrider.wire.protocol import PROTOCOL
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.telemetry.metrics import GatewayMetrics
from tests.unit.gateway.rounds.test_detokenizer import byte_level

INFO = pb.WorkerInfo(
    model_id="model",
    vocab_size=128,
    context_limit=512,
    tokenizer_fingerprint="f",
    epoch=7,
    num_slots=64,
    protocol=PROTOCOL,
)


def link_of(connection: object | None, info: pb.WorkerInfo = INFO) -> Any:
    """What a Member reads of a WorkerLink."""
    return SimpleNamespace(
        connection=connection, info=info, model_path=info.model_id, refused=None, silent_s=0.0, rtt_s=0.001
    )


def connection_of(epoch: int = 7) -> Any:
    """One that nobody reads."""
    return SimpleNamespace(is_alive=True, epoch=epoch, info=INFO, is_hung=False, send=lambda item: None)


def served_model(
    targets: dict[str, Any], drafts: dict[str, Any], *, gateway: GatewayConfig | None = None, draft_pools: int = 1
) -> ServedModel:
    """Links by the names of their workers. draft_pools: over which the drafts are spread in turn."""
    config = gateway or GatewayConfig(target="127.0.0.1:9")
    model = ServedModel(PoolSpec("target", "target"), SharedServices(config, GatewayMetrics(), None))
    model.set_reference(ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), INFO.model_id))
    for name, link in targets.items():
        model.targets[name] = TargetMember(MemberSpec(name, "target", "target", name, name), cast(Any, link))
    model.draft_pools = tuple(f"draft {number}" for number in range(draft_pools)) if drafts else ()
    for number, (name, link) in enumerate(drafts.items()):
        pool = model.draft_pools[number % draft_pools]
        model.drafts[name] = DraftMember(MemberSpec(name, pool, "draft", name), cast(Any, link))
    model.note_change()
    return model
