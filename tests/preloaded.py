"""What service processes import, once, in the process that they are forked from. Importing this computes nothing."""

import pytest  # noqa: F401  a forked process looks at the main module of the one that asked for it
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import target_service.servicer
import target_service.verifier  # noqa: F401
