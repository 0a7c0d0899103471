"""The attention paths: how a forward stores and reads keys and values. `docs/glossary.md` has their names.

Start at `forward_path.py`, the interface of a path. `fused.py`, `paged.py` and `dense.py` are the paths;
`paged_attention` and `varlen_attention` are two backends of the paged one. Imports `architectures`, `quantization`,
`memory`, `step_plan` and what is below them, of `native` the C++ forward; no loader and no worker.
"""
