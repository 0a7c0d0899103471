"""Write prompts for `outrider train-head`: beginnings for the target to continue, cut from the corpus.

    python -m models.recipe.prompts WORK [--count N]

Writes WORK/prompts.jsonl. They are windows of WORK/train.bin at random places, of 32 to 128 tokens: what is served
begins anywhere, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from models.recipe.pair import END_OF_TEXT, TOKENIZER_FOLDER, read_ids

LENGTHS = 32, 128
"""Minimum and maximum number of tokens of a prompt. Longer prompts leave fewer tokens of the context to the target's
own output."""


def prompts(ids: npt.NDArray[np.uint16], tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> Iterator[str]:
    """Yield `count` prompts: windows of `ids` at random places. A prompt is from one text: what a window has of an
    earlier text, or of a cut character at its ends, is left out.

    Raises ValueError if there are too few ids for a prompt.
    """
    if len(ids) <= LENGTHS[1]:
        raise ValueError(f"the part has {len(ids)} tokens, a prompt may take {LENGTHS[1]}: add text")
    rng = np.random.default_rng(seed)
    while count:
        length = int(rng.integers(LENGTHS[0], LENGTHS[1] + 1))
        start = int(rng.integers(0, len(ids) - length))
        text = tokenizer.decode(ids[start : start + length]).rpartition(END_OF_TEXT)[2].strip("\ufffd")
        if len(tokenizer.encode(text)) >= LENGTHS[0]:
            count -= 1
            yield text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder that models.recipe.prepare filled")
    parser.add_argument("--count", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.work / TOKENIZER_FOLDER)
    with (args.work / "prompts.jsonl").open("w", encoding="utf-8") as out:
        for text in prompts(read_ids(args.work / "train.bin"), tokenizer, args.count, args.seed):
            out.write(json.dumps({"prompt": text}) + "\n")


if __name__ == "__main__":
    main()
