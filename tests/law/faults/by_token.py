"""A target that looks at proposals token by token, as it does under lenience. No fault: this, too, has the
target's law.
"""

from target_service.step import decide, decide_on_device
from tests.law.faults import replace, run_target


def decide_by_token() -> None:
    for rules in (decide, decide_on_device):
        replace(rules, "is_block", lambda proposal: False)


if __name__ == "__main__":
    decide_by_token()
    run_target()
