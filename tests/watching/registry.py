"""`python -m tests.watching.registry ADDRESS TARGET,... DRAFT,...`: the launcher's registry, of workers that it did not
place. It runs until it is killed.
"""

import signal
import sys
import time
from concurrent.futures import Future

from deploy.registry import Registry
from gateway.workers.membership import DRAFTS, TARGETS
from outrider.v1 import registry_pb2 as pb
from outrider.wire.processes.worker_main import announce


def main(address: str, targets: str, drafts: str) -> None:
    registry = Registry(_scale)
    address = registry.start(address, None)
    registry.send_membership(_membership({TARGETS: targets.split(","), DRAFTS: drafts.split(",")}))
    announce(address=address)
    signal.pause()


def _membership(addresses: dict[str, list[str]]) -> pb.WorkerList:
    """Of a launcher's new life."""
    roles = {TARGETS: pb.ROLE_TARGET, DRAFTS: pb.ROLE_DRAFT}
    pools = [pb.Pool(name=TARGETS, role=pb.ROLE_TARGET), pb.Pool(name=DRAFTS, role=pb.ROLE_DRAFT, serves=[TARGETS])]
    members = [
        pb.Worker(name=f"{pool}-{index}", pool=pool, role=roles[pool], state=pb.WORKER_STATE_SERVING, address=address)
        for pool in addresses
        for index, address in enumerate(addresses[pool])
    ]
    return pb.WorkerList(epoch=time.time_ns(), version=1, pools=pools, workers=members)


def _scale(_pool: str, _count: int | None) -> Future[pb.ScaleReply]:
    done: Future[pb.ScaleReply] = Future()
    done.set_result(pb.ScaleReply())
    return done


if __name__ == "__main__":
    main(*sys.argv[1:])
