"""`FOLDER`: rank 1 of a target as an actor of Ray holds it, without Ray. Run by test_parallel_team."""

import sys
import threading

from deploy.actors import FollowerActor

FollowerActor(sys.argv[1], 1, None, None, "")
threading.Event().wait()
