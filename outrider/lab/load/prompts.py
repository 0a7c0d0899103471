"""Prompts of `outrider bench`: a file's, or a few of every sort that come with it."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.demo.demo_runs import read_prompts
from outrider.wire.errors import ConfigError

PROMPTS = (
    "The lighthouse keeper wrote in his log every evening, even when there was nothing to report. On the night of the "
    "storm he began:",
    'def median(values):\n    """Return the median of a non-empty list of numbers."""\n',
    '{"name": "Ada", "year": 1815}\n{"name": "Grace", "year": 1906}\n{"name": "Alan", "year": 1912}\n{"name":',
    "Question: Why does bread rise?\nAnswer:",
    "Translate into French.\nEnglish: The train leaves at nine.\nFrench:",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    "Minutes of the meeting on Tuesday\n\nPresent: Kim, Lee, Park\n\n1. The budget for next year was",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\nJOIN orders ON",
    "To boil an egg, first",
    "import json\nimport sys\n\n\ndef main():\n    with open(sys.argv[1]) as file:\n        records = json.load(file)\n"
    "    for record in records:\n",
    "| country | capital |\n|---|---|\n| France | Paris |\n| Japan | Tokyo |\n| Kenya |",
    "Dear Dr. Moreau,\n\nthank you for your letter of 3 March. With regard to the samples that you asked for, we",
    "The three laws of thermodynamics, in plain words:\n\n1.",
    '<ul>\n  <li><a href="/home">Home</a></li>\n  <li><a href="/about">About</a></li>\n',
    "Q: A farmer has 17 sheep and buys 5 more, then sells 9. How many are left?\nA: Let us count step by step.",
    'for i in range(1, 101):\n    if i % 15 == 0:\n        print("FizzBuzz")\n',
)


def prompts_of(path: Path | None) -> tuple[str, ...]:
    """Return a file's prompts: JSONL with a `prompt` in each line (*.jsonl), or a text with one in each line; without a
    file, PROMPTS. Raises ConfigError.
    """
    if path is None:
        return PROMPTS
    if path.suffix == ".jsonl":
        found = read_prompts(path)
    else:
        try:
            found = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read prompts from {path}: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no prompt: one is to be in each line, in a *.jsonl as an object's `prompt`")
    return tuple(found)
