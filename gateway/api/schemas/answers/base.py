"""The base class of the models of responses."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AnswerModel(BaseModel):
    model_config = ConfigDict(extra="forbid")
