"""The part that needs torch: KV cache, model runner, sampling, acceptance. Used by the two worker services."""

import logging

# Where it is installed, transformers imports it for its own sake, and it tells of kernels for other machines.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
