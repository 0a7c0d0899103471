"""The three ways to draft that `outrider demo` shows, each with prompts that suit it.

The demo target does not follow instructions: it continues Python code. A penalty on repetition keeps its greedy output
from loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.demo.demo_runs import read_prompts
from outrider.client import Speculation
from outrider.wire.settings.system import demo_model

REPETITION_PENALTY = 1.1
NUM_DRAFT_TOKENS = 5
"""Number of draft tokens per round that the draft model proposes in the demo. It is fixed, so that the demo shows draft
tokens even where they do not pay."""
NUM_PROMPTS = 5


@dataclass(frozen=True, slots=True)
class DemoPart:
    """One way to draft that the demo shows: its description, prompts and options."""

    title: str
    description: str
    """A sentence on where this way to draft gets its draft tokens."""
    prompts: tuple[str, ...]
    """Prompts whose outputs are measured. The output of the first is also printed."""
    speculation: Speculation
    before: Callable[[str], str] | None = None
    """Function that makes the request's prediction from an output of plain decoding, by undoing an edit. None = the
    requests have no prediction."""


def parts() -> list[DemoPart]:
    """Return the three ways to draft, in the order in which the demo shows them. Raises ConfigError if the demo pair is
    not installed.
    """
    held_out = read_prompts(Path(demo_model("target")).parent / "prompts.jsonl")
    return [
        DemoPart(
            "an edit",
            "the answer is a file after an edit, and the file before it is the request's `prediction`",
            _CODE,
            Speculation(drafter="prediction"),
            before_edit,
        ),
        DemoPart(
            "n-grams",
            "the answer repeats itself in parts, as code does; what followed before is drafted, without a model",
            _REPEATING,
            Speculation(drafter="ngram"),
        ),
        DemoPart(
            "a draft model",
            f"a model of a twelfth of the target's size drafts {NUM_DRAFT_TOKENS} tokens a round",
            tuple(held_out[:NUM_PROMPTS]),
            Speculation(drafter="model", num_draft_tokens=NUM_DRAFT_TOKENS),
        ),
    ]


def before_edit(after: str) -> str:
    """Return the text `after` without its third line. The demo takes it as the text before an edit that inserted this
    line.
    """
    lines = after.split("\n")
    return "\n".join(lines[:2] + lines[3:])


_CODE = (
    'def parse_header(line):\n    """Return the name and the value of a header."""\n'
    '    name, value = line.split(":", 1)\n',
    'class Stack:\n    """A list of values, of which the last one is taken first."""\n\n'
    "    def __init__(self):\n        self.items = []\n\n    def push(self, value):\n",
    "class Account:\n    def __init__(self, owner, balance=0):\n        self.owner = owner\n"
    "        self.balance = balance\n\n    def deposit(self, amount):\n",
    'def read_config(filename):\n    """Read a file of settings and return them as a dictionary."""\n    config = {}\n'
    "    with open(filename) as file:\n        for line in file:\n",
    'def send_request(host, port, message):\n    """Send a message to a server, and return its answer."""\n'
    "    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)\n",
)
_REPEATING = (
    'def parse_header(line):\n    """Return the name and the value of a header."""\n'
    '    name, value = line.split(":", 1)\n    return name.strip(), value.strip()\n\n\n'
    'def parse_cookie(line):\n    """Return the name and the value of a cookie."""\n'
    '    name, value = line.split("=", 1)\n    return name.strip(), value.strip()\n\n\n'
    "def parse_option(line):\n",
    "    def test_read(self):\n        with open(self.path) as file:\n"
    '            self.assertEqual(file.read(), "text")\n\n'
    "    def test_read_lines(self):\n        with open(self.path) as file:\n"
    '            self.assertEqual(file.readlines(), ["text"])\n\n    def test_write(self):\n',
    "class TestColors(unittest.TestCase):\n    def test_red(self):\n"
    '        self.assertEqual(parse("red"), (255, 0, 0))\n\n'
    '    def test_green(self):\n        self.assertEqual(parse("green"), (0, 255, 0))\n\n    def test_blue(self):\n',
    '    parser.add_argument("--host", help="name of the host", default="localhost")\n'
    '    parser.add_argument("--port", help="number of the port", default=8000)\n'
    '    parser.add_argument("--user", help=',
    'class Point:\n    def get_x(self):\n        """Return the x coordinate of the point."""\n        return self.x\n\n'
    '    def get_y(self):\n        """Return the y coordinate of the point."""\n        return self.y\n\n'
    "    def get_z(self):\n",
)
