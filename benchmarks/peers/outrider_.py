"""Run Outrider as its users do: target, draft and gateway as processes, driven by the SDK through the gateway.

`options`: layout is "shared" (both workers on all the cores, a thread for each) or "apart" (the last core is the
draft's). Without a draft the target drafts by n-grams. It is not one process, so it is not stopped while others run: it
sleeps when it has no work.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from protocol import Answer, Job, Setup, serve

from benchmarks.peers.passes import PHASES, phase_shares, run_pass
from benchmarks.running import running
from outrider import __version__
from outrider.client import AsyncClient, Speculation


class Outrider:
    def __init__(self, setup: Setup) -> None:
        self.version = f"Outrider {__version__}"
        self._num_draft_tokens = setup.num_draft_tokens
        self._processes = contextlib.ExitStack()
        endpoints = self._processes.enter_context(running(**system(setup)))
        self._address = endpoints.grpc

    def run(self, job: Job) -> Answer:
        return asyncio.run(self._run(job))

    async def _run(self, job: Job) -> Answer:
        wishes = Speculation(num_draft_tokens=self._num_draft_tokens) if job.speculative else False
        async with AsyncClient(self._address) as client:
            await client.models()  # the connection is made before the clock runs
            sample = await run_pass(
                client,
                job.prompts,
                concurrency=job.concurrency,
                temperature=job.temperature,
                max_tokens=job.max_tokens,
                speculation=wishes,
                seed=job.seed,
            )
        drafted = sum(item.num_drafted for item in sample.rounds)
        accepted = sum(item.num_accepted for item in sample.rounds)
        shares = phase_shares(sample.rounds)
        detail = {name: shares[name] for name in PHASES} | {"rounds": float(len(sample.rounds))}
        return Answer(sample.outputs, sample.elapsed_s, drafted or None, accepted if drafted else None, detail)

    def close(self) -> None:
        self._processes.close()


def system(setup: Setup) -> dict[str, Any]:
    """Return the settings of `outrider up`, as its file would hold them."""
    cores = {"target": setup.cores, "draft": setup.cores}
    if setup.options["layout"] == "apart" and len(setup.cores) > 1:
        cores = {"target": setup.cores[:-1], "draft": setup.cores[-1:]}
    workers: dict[str, dict[str, Any]] = {}
    models = {"target": setup.target}
    if setup.draft:
        models["draft"] = setup.draft
    for role, model in models.items():
        workers[role] = {
            "model": model,
            "dtype": setup.dtype,
            "cpu_cores": ",".join(map(str, cores[role])),
            "prefix_caching": False,
            "max_slots": setup.max_concurrency,
            "context_limit": setup.context,
        }
    gateway: dict[str, Any] = {"num_draft_tokens": setup.num_draft_tokens, "max_running": setup.max_concurrency}
    if not setup.draft:
        gateway["drafter"] = "ngram"
    return {"draft": None, **workers, "gateway": gateway}


if __name__ == "__main__":
    serve(Outrider)
