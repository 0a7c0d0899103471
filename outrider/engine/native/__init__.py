"""The C++ library: a forward of our own for a CPU, and random numbers for whole vocabularies.

`build.py` compiles it on the machine that runs it, `library.py` binds it to Python. Start at `model.h`, which describes
the model and the plan of a step; `step.h` contains the forward. Imports nothing of the engine.
"""
