"""`Workload`: what is asked of the server. The text itself lives in `bench/`; here are counts only.

Shipped workloads are YAML files in `freetoken/data/workloads/`; a recipe names one or writes one out.
"""

# No `from __future__ import annotations`: pydantic would compile each field's annotation again, 5 % of `ft plan`.
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from freetoken import units

Tokens = Annotated[int, BeforeValidator(units.parse_tokens, json_schema_input_type=int | str), Field(ge=0)]


class Workload(BaseModel):
    """Turns of one conversation, how many run at once, and what context that needs. All counts are tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "inline"
    description: str = ""
    #: Turns of one conversation; each sends the whole history again.
    turns: int = Field(default=1, ge=1, le=1000)
    #: Prefix that every conversation shares (system prompt, tool schemas).
    shared_prefix_tokens: Tokens = 0
    #: New prompt tokens that each turn adds.
    prompt_tokens: Tokens = 1024
    output_tokens: Annotated[Tokens, Field(ge=1)] = 256
    concurrency: int = Field(default=1, ge=1, le=1024)
    #: Tokens one request may hold; at least what the last turn needs. Computed where it is not given.
    context_tokens: Tokens = 0
    #: Where the text comes from: the standard library's source, its prose, or a recording (a path).
    text: Literal["code", "prose", "recorded"] = "code"
    recording: str | None = None

    @model_validator(mode="after")
    def _context_holds_the_last_turn(self) -> "Workload":
        needed = self.needed_context_tokens
        if self.context_tokens == 0:
            object.__setattr__(self, "context_tokens", needed)
        elif self.context_tokens < needed:
            raise ValueError(
                f"`context_tokens` is {self.context_tokens:,}, but the last of {self.turns} turns needs {needed:,}"
            )
        return self

    @property
    def needed_context_tokens(self) -> int:
        """Prompt and output of the last turn, history included."""
        return self.shared_prefix_tokens + self.turns * (self.prompt_tokens + self.output_tokens)

    @property
    def kv_tokens(self) -> int:
        """KV tokens that must be held at once: the context of every concurrent conversation."""
        return self.concurrency * self.context_tokens

    @property
    def first_prompt_tokens(self) -> int:
        """Prompt of the first turn, shared prefix included: nothing of it is cached."""
        return self.shared_prefix_tokens + self.prompt_tokens

    @property
    def largest_prompt_tokens(self) -> int:
        """Prompt of the last turn, history included."""
        return self.needed_context_tokens - self.output_tokens
