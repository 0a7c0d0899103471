"""What a head's features cost: bytes a committed token, with the opening map on the target and without; the map itself.

    make bench-features                               # or: python -m benchmarks.features --help

The demo pair is measured on the wire, by the workers' counters. What shapes of 8B and 70B models would send is computed
from the message that carries a row; their opening maps are real ones of random weights, timed on a core, and registered
over gRPC at a target process of that width with one layer of random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.common import (
    DEMO_EAGLE3,
    DEMO_TARGET,
    WORK,
    Report,
    dev_prompts,
    head_at,
    num_parameters,
    parser,
    spread,
)
from benchmarks.heads import until_drafted
from benchmarks.overlap.checkouts import this_checkout
from benchmarks.overlap.systems import ended_with_block, split, started_worker, told
from benchmarks.passes import run_pass
from draft_service.targets.deliveries import Deliverer
from draft_service.targets.registration import HeadOffer
from outrider.client import Drafter, Speculation
from outrider.engine.attention.forward_path import NORMED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import read_eagle3
from outrider.engine.heads.opening import OpeningMap, OpeningSpec
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.v1 import target_pb2_grpc
from outrider.wire.telemetry.metrics import WorkerMetrics

FRAMES_BYTES = 5 + 9
"""Of a message: gRPC's prefix and the header of an HTTP/2 frame."""
WIDE_ID = (1 << 62) + 1
"""A ticket or an epoch of usual length."""
POSITION = 5000
NUM_ROWS = (1, 5, 256)
"""Tokens at once: a plain step, a step that keeps four drafts, and a piece of a prompt."""
NUM_TIMED = 5
VOCAB = 4096
"""Of targets of one layer, which have the demo pair's tokenizer."""


@dataclass(frozen=True)
class Shape:
    """A head's opening map, and the target that it is for."""

    name: str
    opening: OpeningMap
    target_width: int
    num_target_parameters: float

    @property
    def num_taps(self) -> int:
        return len(self.opening.spec.taps)


def demo(head: Path) -> Shape:
    target = TargetFiles(str(DEMO_TARGET))
    opening = read_eagle3(Checkpoint(str(head)), target).opening
    return Shape("demo", opening, target.width, num_parameters(DEMO_TARGET))


def of_width(name: str, width: int, num_target_parameters: float) -> Shape:
    """Return three taps of that width and a head as wide, bfloat16, random."""
    taps, generator = (0, 1, NORMED), torch.Generator().manual_seed(0)
    fc = torch.randn(width, len(taps) * width, generator=generator, dtype=torch.bfloat16)
    return Shape(name, OpeningMap(OpeningSpec(taps, width), {"fc": fc}), width, num_target_parameters)


LARGE = {"8B": (4096, 8.03e9), "70B": (8192, 70.6e9)}
"""Width and parameters of Llama 3.1's sizes."""


def one_layer(width: int) -> Path:
    """Return a target of that width with one layer of random weights, made when missing."""
    folder = WORK / f"one-layer-{width}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=width,
            num_hidden_layers=1,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(DEMO_TARGET).save_pretrained(folder)
    return folder


def row_bytes(width: int) -> int:
    """Return the bytes of one row of bfloat16."""
    return 2 * width


def message_bytes(width: int) -> int:
    """Return the bytes of a message with one row, as it is on the wire."""
    data = bytes(row_bytes(width))
    rows = tpb.FeatureRows(ticket=WIDE_ID, target_epoch=WIDE_ID, start=POSITION, num_rows=1, data=data)
    return FRAMES_BYTES + tpb.FeatureBatch(rows=[rows]).ByteSize()


async def on_the_wire(report: Report, head: Path, options: argparse.Namespace) -> None:
    """Answer prompts with the head as the draft, and count."""
    more = {"draft": ("--target-model", str(DEMO_TARGET))}
    prompts = dev_prompts(options.prompts)
    speculation = Speculation(drafter=Drafter.MODEL, num_draft_tokens=options.k)
    async with split(this_checkout(), DEMO_TARGET, head, more=more) as pair:
        await until_drafted("the head", pair.near.client, speculation, pair.draft)
        before = pair.near.counts()
        sample = await run_pass(
            pair.near.client,
            prompts,
            concurrency=options.concurrency,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            speculation=speculation,
        )
        after = pair.near.counts()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    num_prompt = sum(len(tokenizer(prompt).input_ids) for prompt in prompts)
    num_committed = num_prompt + sample.num_tokens
    sent, rows, received = (
        after.since(before, part, f"outrider_worker_feature_{what}_total", fate=fate)
        for part, what, fate in (
            ("target", "bytes", "sent"),
            ("target", "rows", "sent"),
            ("draft", "bytes", "received"),
        )
    )
    found = {
        "prompt tokens": num_prompt,
        "answer tokens": sample.num_tokens,
        "tokens a pass": sample.num_tokens / len(sample.rounds),
        "rows sent": rows,
        "bytes sent": sent,
        "bytes received": received,
        "bytes a committed token": sent / num_committed,
    }
    report.data["wire"] = found
    columns = list(found)
    report.table(
        "The demo pair on the wire", ("", *columns), [["counted", *(f"{value:.6g}" for value in found.values())]]
    )


def add_bytes(report: Report, shapes: Sequence[Shape]) -> None:
    rows = []
    for shape in shapes:
        opened, raw = shape.opening.spec.width, shape.num_taps * shape.target_width
        rows.append(
            [
                shape.name,
                f"{shape.num_taps} x {shape.target_width}",
                str(opened),
                *map(str, (row_bytes(opened), row_bytes(raw), message_bytes(opened), message_bytes(raw))),
                f"{message_bytes(raw) / message_bytes(opened):.2f}",
            ]
        )
    columns = (
        "shape",
        "taps",
        "width of a row",
        "row, bytes",
        "raw taps, bytes",
        "message with a row",
        "with raw taps",
    )
    report.table("Bytes a committed token (computed from the message)", (*columns, "raw / row"), rows)
    report.data["bytes"] = rows


@torch.inference_mode()
def map_seconds(opening: OpeningMap, target_width: int, num_rows: int) -> list[float]:
    """Return what the map takes for so many tokens at once, time by time."""
    taps = torch.randn(num_rows, len(opening.spec.taps), target_width)
    found = list[float]()
    for _ in range(NUM_TIMED + 1):  # the first warms
        began = time.perf_counter()
        opening(taps)
        found.append(time.perf_counter() - began)
    return found[1:]


def add_map(report: Report, shapes: Sequence[Shape]) -> None:
    """Time the maps on a core."""
    torch.set_num_threads(1)
    rows = []
    for shape in shapes:
        times = {num: map_seconds(shape.opening, shape.target_width, num) for num in NUM_ROWS}
        report.data[f"map, {shape.name}"] = {str(num): taken for num, taken in times.items()}
        share = sum(tensor.numel() for tensor in shape.opening.tensors.values()) / shape.num_target_parameters
        us = [spread([1e6 * taken / num for taken in times[num]]) for num in NUM_ROWS]
        rows.append([shape.name, f"{shape.opening.num_bytes / 2**20:.2f}", f"{100 * share:.2f} %", *us])
    columns = ("shape", "map, MiB", "of the target's parameters", *(f"us a token, {num} at once" for num in NUM_ROWS))
    report.table("The opening map on one core", columns, rows)


async def registered(shape: Shape, target: Path) -> tuple[int, float, float]:
    """Register a map at a target process. Return its bytes as sent, and the seconds that the first and a second draft
    with it wait.
    """
    offer = HeadOffer.of(shape.opening)
    with ended_with_block([]) as children:
        more = ("--kv-cache-tokens", "4096", "--dtype", "bfloat16")
        children.append(started_worker(this_checkout(), "target_service", target, 1, *more))
        address = str((await asyncio.to_thread(told, children[0]))["address"])
        async with grpc.aio.insecure_channel(address) as channel:
            info = await target_pb2_grpc.TargetServiceStub(channel).GetInfo(pb.GetInfoRequest())
        drafts, taken = list[Deliverer](), list[float]()
        for _ in range(2):
            drafts.append(Deliverer(WorkerMetrics("draft"), lambda job: None, offer=offer))
            began = time.perf_counter()
            await drafts[-1].register(address, info.epoch)
            taken.append(time.perf_counter() - began)
        for draft in drafts:
            await draft.close()
    return len(offer.data), taken[0], taken[1]


async def add_registrations(report: Report, shapes: Sequence[Shape]) -> None:
    rows = []
    for shape in shapes:
        target = DEMO_TARGET if shape.name == "demo" else one_layer(shape.target_width)
        num_bytes, first, second = await registered(shape, target)
        rows.append([shape.name, str(num_bytes), f"{first:.3f}", f"{second:.3f}"])
        report.data[f"registration, {shape.name}"] = [num_bytes, first, second]
    columns = ("shape", "bytes sent", "first draft, s", "a second one, s")
    report.table("Registration of the map over gRPC on one machine", columns, rows)


def main() -> None:
    made = parser(__doc__, prompts=12, max_tokens=96, temperature=0.0, k=4, concurrency=1)
    made.add_argument("--eagle3", type=Path, default=DEMO_EAGLE3, help="folder of the EAGLE-3 head")
    made.add_argument("--shapes", nargs="*", default=list(LARGE), choices=list(LARGE), help="beside the demo pair's")
    options = made.parse_args()
    head = head_at(options.eagle3, "eagle3")
    report = Report("features", "What a head's features cost")
    report.text(
        f"The demo pair: {options.prompts} held-apart prompts, {options.concurrency} at once, {options.max_tokens} "
        f"tokens each, K = {options.k}, T = {options.temperature:g}; tokens of prompts and answers are committed. "
        "Shapes of 8B and 70B: three taps of a Llama 3.1 of that size and a head as wide, random weights in bfloat16."
    )
    asyncio.run(on_the_wire(report, head, options))
    shapes = [demo(head), *(of_width(name, *LARGE[name]) for name in options.shapes)]
    add_bytes(report, shapes)
    asyncio.run(add_registrations(report, shapes))
    add_map(report, shapes)
    report.write(options.results)


if __name__ == "__main__":
    main()
