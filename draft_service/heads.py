"""Drafts that are not whole models: what they are made of, how they are paired with a target, and who drafts by them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from draft_service.jobs import EngineJob, Rows
from outrider.engine.heads.loader import LoadedEagle3, LoadedMedusa
from outrider.engine.heads.wiring import Outcome, Seen
from outrider.wire.log import get_logger

log = get_logger(__name__)
