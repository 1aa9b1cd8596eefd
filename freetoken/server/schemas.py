"""Bodies that the HTTP API takes. Fields that are not known are ignored, as clients send many; what would change the
answer and is not supported is refused by name (`refuse_unsupported`), never ignored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from freetoken.errors import UsageError

#: Prompts of one request: more could not be queued.
MOST_PROMPTS = 1024
#: Seconds that a control call may wait at most.
MOST_WAIT_S = 86_400


class Body(BaseModel):
    """Base: unknown fields ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    """`include_usage` adds a last chunk with token counts."""

    include_usage: bool = False


class SamplingFields(Body):
    """What both OpenAI endpoints share; None = the model's default."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def refuse_unsupported(self) -> None:
        """Raises UsageError naming what this engine does not do."""
        if self.n not in (None, 1):
            raise UsageError(f"`n` is {self.n}, this engine gives one choice for a request")
        if self.logit_bias:
            raise UsageError("`logit_bias` is not supported")
        if len(self.stops) > 16:
            raise UsageError(f"`stop` has {len(self.stops)} strings, at most 16 are supported")


class ChatBody(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    logprobs: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def token_limit(self) -> int | None:
        """What the request itself says; None where it says nothing."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools, unless the choice is `none`."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def template_options(self) -> dict[str, Any]:
        """Further arguments of the chat template."""
        options = {key: value for key, value in self.chat_template_kwargs.items() if key not in _OWN_TEMPLATE_NAMES}
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                options.setdefault("enable_thinking", False)
        if self.thinking is not None:
            is_on = self.thinking if isinstance(self.thinking, bool) else self.thinking.get("type") != "disabled"
            options.setdefault("enable_thinking", is_on)
        return options

    def refuse_unsupported(self) -> None:
        """Raises UsageError naming what this engine does not do."""
        super().refuse_unsupported()
        for tool in self.tools or ():
            function = tool.get("function", tool)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise UsageError("every one of `tools` needs a `function` with a `name`")
        if self.functions or self.function_call:
            raise UsageError("`functions` and `function_call` are not supported, use `tools`")
        if self.response_format is not None and self.response_format.get("type") not in (None, "text"):
            raise UsageError(f"`response_format` of type `{self.response_format['type']}` is not supported")
        if self.logprobs:
            raise UsageError("`logprobs` is not supported")
        if self.tool_choice not in (None, "auto", "none"):
            raise UsageError("`tool_choice` can be `auto` or `none`: this engine cannot force a call")


#: Arguments of `apply_chat_template` that are ours, not a request's: the template itself above all.
_OWN_TEMPLATE_NAMES = frozenset({
    "conversation", "messages", "chat_template", "tools", "documents", "tokenize", "add_generation_prompt",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


class CompletionBody(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    max_tokens: int | None = Field(default=None, ge=1)
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str]:
        """The text prompts. Raises UsageError for token ids, and for a list where the answer streams."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or not all(isinstance(one, str) for one in self.prompt):
            raise UsageError("`prompt` must be a text or a list of texts; token ids are not supported")
        if len(self.prompt) > MOST_PROMPTS:
            raise UsageError(f"`prompt` is a list of {len(self.prompt):,}, at most {MOST_PROMPTS} are taken at once")
        if self.stream and len(self.prompt) > 1:
            raise UsageError(f"`prompt` is a list of {len(self.prompt)}, only one prompt can be streamed")
        return [str(one) for one in self.prompt]

    def refuse_unsupported(self) -> None:
        """Raises UsageError naming what this engine does not do."""
        super().refuse_unsupported()
        for name in ("echo", "suffix", "logprobs"):
            if getattr(self, name):
                raise UsageError(f"`{name}` is not supported")
        if self.best_of not in (None, 1):
            raise UsageError(f"`best_of` is {self.best_of}, this engine gives one choice for a request")
        _ = self.prompts


class GenerateBody(Body):
    """`POST /generate`: greedy, no chat template."""

    prompt: str
    max_tokens: int = 16
    ignore_eos: bool = False


class MessagesBody(Body):
    """`POST /v1/messages` (Anthropic)."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class RebuildBody(Body):
    """`POST /v1/cache/rebuild`. What is left out stays as it is."""

    moe_cache_size: int | None = Field(default=None, ge=0)
    num_pages: int | None = Field(default=None, ge=0)
    num_mamba_slots: int | None = None
    num_swa_pages: int | None = None
    swa_full_tokens_ratio: float | None = None
    mode: Literal["if_idle"] = "if_idle"
    timeout: float = Field(default=300.0, ge=0, le=MOST_WAIT_S)


class PrepareStopBody(Body):
    """`POST /v1/admin/prepare-stop`."""

    drain_timeout_s: float = Field(default=5.0, ge=0, le=10)
    abort_timeout_s: float = Field(default=3.0, ge=0, le=4)
