"""Tensor parallelism: the target's weights split over processes of one machine.

Rank 0 is the worker; followers hold the other shares and repeat its forwards. In `meeting` they find each other and
notice each other's end, `messages` encodes the commands, `group` holds torch's own collectives, `team` is rank 0's
part, `follower` the others'.
"""
