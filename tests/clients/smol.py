"""An agent of smolagents with tools of its own: python smol.py URL MODEL TASK."""

import subprocess
import sys
from pathlib import Path

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def read(path: str) -> str:
    """Read a file.

    Args:
        path: Its path.
    """
    return Path(path).read_text()


@tool
def write(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: Its path.
        text: What it is to hold.
    """
    Path(path).write_text(text)
    return "written"


@tool
def run(command: str) -> str:
    """Run a command.

    Args:
        command: For the shell.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    url, model, task = sys.argv[1:]
    agent = ToolCallingAgent(
        [read, write, run], OpenAIModel(model, api_base=url, api_key="any", tool_choice="auto"), max_steps=6
    )
    print(agent.run(task))
