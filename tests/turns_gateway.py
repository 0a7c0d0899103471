"""`python -m tests.turns_gateway`: a gateway that lets draft and target take turns, one step at a time.

No draft is late then, so that under `rejection` a seed gives the same text again, and each proposal has all its K
tokens whatever the machine.
"""

import sys
from functools import partial

from gateway.__main__ import main
from gateway.rounds import verification
from gateway.workers.drafts import draft_limits
from outrider.wire.requests.speculation import Speculation

if __name__ == "__main__":
    draft_limits.Speculation = partial(Speculation, is_sequential=True)  # type: ignore[assignment, misc]
    verification.TOKENS_AHEAD = 1
    main(sys.argv[1:])
