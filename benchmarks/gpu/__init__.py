"""What is right on a GPU and how fast it is, told by two commands within four minutes each, whatever fails on the way.

    python3 -m benchmarks.gpu right|fast            a kit
    python3 -m benchmarks.gpu SECTION               one section
    python3 -m benchmarks.gpu right --rehearse      on the CPU, at sizes whose figures say nothing

A card is at hand seldom and for fifteen minutes, on a bare machine: Python 3.12, torch, triton and transformers; no
network, no Ray or FastAPI, no virtual environment, perhaps no make. So the kit takes the wheels in .whl (`make
gpu-wheels`), names what is missing, starts workers as plain processes and takes their rounds through the gateway's
coordinator in process.

A section is a module with `run(bench)`. It runs in a process of its own, in a session that is killed at its limit with
all that it started, and needs nothing that another made. What it finds it reports as it finds it: rows of tables,
findings (something is not as it has to be) and one line that sums it up. The parent (`runner`) prints a line a section
and writes `gpu-KIT.json` and `gpu-KIT.md` anew whenever there is something new (`document`), so that a run that is cut
off still tells. A section that crashes is a finding with its traceback; one that hangs, with where its threads stood.
Its seconds count from when it has imported torch, which on four cores and more it does while the one before it runs.
What a section leaves of its limit is the next one's.

Limits in seconds, in order of worth; each kit's add up to 240 or less (`sections`):

| right | s | | fast | s |
|---|---:|---|---|---:|
| start: wheels, torch's first import | 20 | | start | 20 |
| versions | 18 | | bandwidth | 18 |
| load | 24 | | served | 124 |
| parity | 46 | | steps | 34 |
| laws | 24 | | profile | 14 |
| together | 34 | | law-times | 14 |
| heads | 34 | | draft | 16 |
| kernels | 10 | | | |
| waits | 10 | | | |
| memory | 10 | | | |
| graphs | 10 | | | |
| in all | 240 | | in all | 240 |
"""
