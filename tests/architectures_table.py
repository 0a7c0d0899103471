"""Writes the tables of docs/reports/architectures.md: `make architectures`, in about six minutes of two cores.

Every class of the installed transformers that writes text is served from a tiny checkpoint, or refused.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

from tests.every_class import LATENT, STATE, Measured, measure_all, row_names

DOCUMENT = Path(__file__).parent.parent / "docs" / "reports" / "architectures.md"
BEGIN, END = "<!-- tables: make architectures -->", "<!-- end of tables -->"
SMALLEST_BOUND = 1e-5
"""Errors below are not told apart: the last bits differ between machines."""
GROUPS = (
    ("compressed", "compressed keys with a state"),
    ("prompt and ring", "the prompt, and a ring of tokens"),
    (STATE, "a running state"),
    ("block indexer", "an indexer's keys, by blocks"),
    ("indexer", "an indexer's keys"),
    ("convolution", "inputs of short convolutions"),
    ("convolution and full", "inputs of short convolutions"),
    ("shared or none", "keys and values that layers share"),
    (LATENT, "latents"),
    ("encoder's", "an encoder's keys and values"),
    ("chunk", "windows or chunks"),
    ("window", "windows or chunks"),
    ("full", "every token's keys and values"),
)
"""What a class is counted under in the summary: the first of its words that is here."""
FAMILIES: tuple[tuple[str, str | None], ...] = (
    ("Qwen3.5, 3.6, 3.8", "qwen3_5"),
    ("Qwen3.5, 3.6, 3.8 MoE", "qwen3_5_moe"),
    ("Qwen4-exp", "qwen4_exp"),
    ("Kimi-K3", "kimi_k3"),
    ("Kimi-Linear", "kimi_linear"),
    ("Nemotron 3, 3.5", "nemotron_h"),
    ("Nemotron Omni", "nemotron_h_omni"),
    ("Ling, Ring 2.6; Ling 3.0", "bailing_hybrid"),
    ("GLM-5.3-Flash", "glm5_next"),
    ("Granite 4", "granitemoehybrid"),
    ("Falcon-H1", "falcon_h1"),
    ("Jamba", "jamba"),
    ("LFM2, 2.5", "lfm2"),
    ("LFM2 MoE", "lfm2_moe"),
    ("LFM3", "lfm3"),
    ("Inkling", "inkling_mm_model"),
    ("Inkling 2", "inkling2"),
    ("DeepSeek-V4 Pro, Flash", "deepseek_v4"),
    ("DeepSeek-V3, R1", "deepseek_v3"),
    ("DeepSeek-V3.2", "deepseek_v32"),
    ("GLM-5, 5.1, 5.2", "glm_moe_dsa"),
    ("HY-V4", "hy_v4"),
    ("dots3", "dots3_note"),
    ("Kimi-K2.5, 2.6, 2.7", "kimi_k25"),
    ("Mistral Small 3, Medium 3.5", "mistral3"),
    ("Ministral 3", "mistral3 (ministral3)"),
    ("Mistral Small 4, Large 3", "mistral3 (mistral4)"),
    ("Mistral Large 4", "mistral_large4"),
    ("Qwen2.5-VL", "qwen2_5_vl"),
    ("Qwen3-VL", "qwen3_vl"),
    ("Qwen3-VL MoE", "qwen3_vl_moe"),
    ("GLM-4.1V", "glm4v"),
    ("GLM-4.6V", "glm46v"),
    ("InternVL 3, 3.5", "internvl (qwen3)"),
    ("MiniMax-M3", "minimax_m3_vl (sparse)"),
    ("Step-3.7", "step3p7"),
    ("Muse-Glimmer", "muse_glimmer"),
    ("Muse-Spark", "muse_spark"),
    ("Gemma 3", "gemma3"),
    ("Gemma 3n", "gemma3n"),
    ("Gemma 4", "gemma4"),
    ("Gemma 4 E2B, E4B", "gemma4_text (shared KV)"),
    ("MiniMax-M2", "minimax_m2"),
    ("GLM-4.6, 4.7", "glm4_moe"),
    ("MiMo-V2-Flash", "mimo_v2_flash"),
    ("Hy3", "hy_v3"),
    ("Hunyuan dense", "hunyuan_v1_dense"),
    ("Hunyuan MoE", "hunyuan_v1_moe"),
    ("Laguna", "laguna (windows)"),
    ("Trinity", "afmoe"),
    ("Mellum2", "mellum"),
    ("LongCat-Flash", "longcat_flash"),
    ("gpt-oss", "gpt_oss"),
    ("Llama 3", "llama"),
    ("Llama 4", "llama4"),
    ("Qwen3", "qwen3"),
    ("Qwen3 MoE, Qwen3-Coder", "qwen3_moe"),
)
"""Models that people run, as they are called, and their row below; None of transformers' has the rest."""


def group_of(row: Measured) -> str:
    """Return what a class is counted under."""
    return next((text for word, text in GROUPS if word in row.memory), "not a decoder of text")


def summary(rows: Sequence[Measured]) -> Iterable[str]:
    """Yield the lines of the count by memory, the last of which is of all."""
    there, served = Counter(map(group_of, rows)), Counter(group_of(row) for row in rows if row.is_served)
    yield "| layers keep | classes | served |"
    yield "|---|---|---|"
    for text in dict.fromkeys([*(text for _, text in reversed(GROUPS)), "not a decoder of text"]):
        yield f"| {text} | {there[text]} | {served[text]} |"
    yield f"| all | {len(rows)} | {served.total()} |"


def families(rows: dict[str, Measured]) -> Iterable[str]:
    """Yield the lines of the models that people run."""
    yield "| models | row | class | verdict |"
    yield "|---|---|---|---|"
    for models, name in FAMILIES:
        row = rows.get(name or "")
        if row is None:
            yield f"| {models} | {name} | - | no class in transformers {transformers.__version__} |"
        else:
            yield f"| {models} | {name} | {row.class_name} | {'served' if row.is_served else reason(row)} |"


def served_table(rows: Iterable[Measured]) -> Iterable[str]:
    """Yield the lines of what is served."""
    yield "| model type | class | memory | path chosen | also runs on | trees | taps | largest error |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        path, *others = row.paths
        trees, taps = ("yes" if has else "no" for has in (row.has_trees, row.features_refusal is None))
        words = f"{row.name} | {row.class_name} | {', '.join(row.memory)} | {path} | {', '.join(others) or '-'}"
        yield f"| {words} | {trees} | {taps} | < {bound(row.error)} |"


def refused_table(rows: Iterable[Measured]) -> Iterable[str]:
    """Yield the lines of what is not."""
    yield "| model type | class | memory | why it is refused |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| {row.name} | {row.class_name} | {', '.join(row.memory) or '-'} | {reason(row)} |"


def reason(row: Measured) -> str:
    """Return why a class is refused, of several paths' reasons the last: `dense` takes whatever any path does."""
    text = row.refusal or ""
    if row.own_error is not None and text.startswith(("transformers cannot use", "cannot load", "the weights of")):
        text = f"transformers' own class does not run on ids: {row.own_error}"
    text = text.rpartition("; dense: ")[2].partition("; use another model, dtype")[0]
    text = text.partition(": largest difference")[0]  # a number that is another on another machine
    return text.removeprefix(f"{row.class_name} ").removeprefix("cannot be served: ").replace("|", "/")


def bound(error: float) -> str:
    """Return the power of ten above."""
    return f"{max(SMALLEST_BOUND, 10 ** math.ceil(math.log10(error))) if error > 0 else SMALLEST_BOUND:.0e}"


def tables(rows: Sequence[Measured]) -> str:
    """Return all that lies between the marks."""
    by_name = {row.name: row for row in rows}
    parts = (
        (f"### How many of what transformers {transformers.__version__} has", summary(rows)),
        ("### Models that people run", families(by_name)),
        ("### Served", served_table(row for row in rows if row.is_served)),
        ("### Refused", refused_table(row for row in rows if not row.is_served)),
    )
    return "\n\n".join("\n".join([title, "", *lines]) for title, lines in parts)


def names_in(text: str) -> list[str]:
    """Return the names of the rows that a document has, served and refused."""
    of_classes = text[text.index("### Served\n") : text.index(END)]
    cells = [line.split(" | ")[0].removeprefix("| ") for line in of_classes.splitlines() if line.startswith("| ")]
    return sorted(cell for cell in cells if cell != "model type")


def main() -> None:
    rows = list[Measured]()
    for row in measure_all(row_names()):
        verdict = "served" if row.is_served else reason(row)
        print(f"{row.name}: {verdict} ({row.seconds:.1f} s)", file=sys.stderr)
        rows.append(row)
    text = DOCUMENT.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{tables(rows)}\n\n{tail}")
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
