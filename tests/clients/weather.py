"""What all clients ask for. The demo pair knows nothing of it: what comes back is right by the grammar alone."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "The weather in Rome for the next three days."
MAX_TOKENS = 300


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)
