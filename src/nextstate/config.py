"""Settings, typed and checked before a model loads.

Read once, at the edge, from weakest to strongest: defaults, a TOML file, NEXTSTATE_* environment variables
(NEXTSTATE_LEARN__RANK=8), command-line options. Below that, code receives the values it uses.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from nextstate.errors import ConfigError
from nextstate.logs import Form


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServeConfig(_Section):
    host: str = "127.0.0.1"
    """Only loopback addresses are served without a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    """0: any free one; the first line of the server's output names it."""
    api_key: SecretStr | None = None
    """A key beside those of `nextstate keys`; any address but loopback needs one of them. Set it by environment."""
    max_queue: PositiveInt = 64
    """Requests that may wait for a free stream; more are answered 429."""
    temperature: NonNegativeFloat = 0.7
    """For requests that name none."""
    max_tokens: PositiveInt = 4096
    """For requests that name none, as those of most agents; the context limits an answer in any case."""
    max_body_bytes: PositiveInt = 8_000_000
    """Larger requests are refused before they are read."""
    max_depth: Annotated[int, Field(ge=8, le=200)] = 64
    """Objects and lists inside one another in a request; the parser would give up at some hundreds."""
    body_timeout_s: PositiveFloat = 30
    """Time that a client has to send the headers of a request, and again to send its body."""
    send_timeout_s: PositiveFloat = 60
    """A client that takes nothing of its answer for this long loses its connection."""


class EngineConfig(_Section):
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights; auto: float32 on a CPU, bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    max_streams: PositiveInt = 16
    """Replies generated at once."""
    threads: PositiveInt = 1
    """CPU threads of the decoding loop; more gain nothing there."""
    tool_form: Literal["hermes", "llama"] | None = None
    """How the model writes tool calls; not set: as its chat template tells."""
    reasoning_form: Literal["none", "think"] | None = None
    """How the model writes what it thinks before it answers; not set: as its chat template tells."""
    prefix_cache_tokens: NonNegativeInt = 4096
    """Tokens of finished sequences whose keys and values are kept for prompts that begin the same way."""


class CollectConfig(_Section):
    idle_s: PositiveFloat = 1800
    """A session without requests for this long ends; its last turn stays without a verdict."""


class StoreConfig(_Section):
    max_age_days: PositiveFloat | None = None
    """A session without requests for this long loses its texts and tokens; None: they are kept."""
    max_gb: PositiveFloat | None = None
    """Size of what is stored beyond which the sessions that have been quiet longest lose theirs; None: no limit."""
    redact: tuple[Literal["keys", "emails", "cards"], ...] = ()
    """What is taken out of texts before they are stored. A turn that held any of it is not trained: its tokens would be
    what was taken out."""
    redact_patterns: dict[str, str] = {}
    """More of that: a name for each regular expression."""

    @field_validator("redact_patterns")
    @classmethod
    def check_patterns(cls, patterns: dict[str, str]) -> dict[str, str]:
        for name, pattern in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{name}' is no regular expression: {error}") from error
        return patterns


class JudgeConfig(_Section):
    base_url: str | None = None
    """An OpenAI-compatible endpoint to ask for votes. Not set: the base weights in the local engine vote."""
    model: str = "judge"
    """The endpoint's name for its model."""
    api_key: SecretStr | None = None
    """The endpoint's key. Set it by environment."""
    votes: PositiveInt = 3
    """Samples a turn, from an endpoint."""
    deadline_s: PositiveFloat = 60
    """Time for one verdict."""
    concurrency: PositiveInt = 4
    """Turns judged at once."""
    max_attempts: PositiveInt = 20
    """A turn on which the judge broke this often is left out. A judge that is down or late does not count."""
    max_wait_s: PositiveFloat = 86_400
    """A turn that a judge which is down or late has kept waiting for this long is left out."""
    data_results: bool = True
    """Count a tool result that is data, such as a number, a record or a listing, and shows no error as good. Prose that
    a tool returned never counts. False: only a status, an exit code or a test verdict makes a result good."""

    @field_validator("base_url")
    @classmethod
    def check_url(cls, url: str | None) -> str | None:
        if url is not None:
            HttpUrl(url)  # refuses what is none; kept as it was written
        return url


HintChoice = Literal["first", "overlap", "overlap_by_token", "random", "longest"]
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


class LearnConfig(_Section):
    enabled: bool = True
    """False: turns are kept, and never judged or trained."""
    objective: Literal["binary", "distillation", "hybrid"] = "hybrid"
    """What trains: good and bad verdicts, the hinted teacher, or both."""
    batch_turns: PositiveInt = 8
    """Turns that start an update."""
    max_wait_s: PositiveFloat = 60
    """A turn that has waited this long starts an update alone: one correction does not wait for a crowd."""
    weights: Literal["lora", "full"] = "lora"
    """What is trained: a LoRA adapter of rank, alpha and targets, or all weights, which takes four times their memory
    more and about a tenth of the learning rate. A data folder belongs to one of them. See training.md."""
    keep_versions: PositiveInt = 4
    """With full weights: versions that served before and can be gone back to, newest first. The weights of older ones
    are removed from disk."""
    rank: PositiveInt = 16
    """Of the adapter: how many directions of each weight matrix it can change."""
    alpha: PositiveInt = 32
    """The adapter's product is scaled by alpha / rank."""
    targets: str = "all-linear"
    """Layers that get an adapter: all-linear, or names joined by commas."""
    learning_rate: NonNegativeFloat = 1e-4
    """Of AdamW. 0 makes versions that change nothing, to see what the way of a version costs or breaks."""
    max_grad_norm: PositiveFloat = 1.0
    """A longer gradient is scaled down to this length."""
    steps: PositiveInt = 1
    """Optimiser steps on one batch."""
    clip_low: PositiveFloat = 0.2
    """The ratio of new to old probability has no pull below 1 - clip_low ..."""
    clip_high: PositiveFloat = 0.28
    """... nor above 1 + clip_high; the wider upper side lets rare tokens grow."""
    reward_weight: NonNegativeFloat = 1.0
    """w_RL: weight of the binary reward."""
    teacher_weight: NonNegativeFloat = 1.0
    """w_OPD: weight of the hinted teacher."""
    teacher: Literal["policy", "average", "base"] = "policy"
    """Who reads the hint: the policy itself, which builds on what it has learned; a moving average of it, which one bad
    update does not take along; or the base, which bounds it."""
    average_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Of the moving average: how far it goes towards the policy after each update."""
    hint_choice: HintChoice = "first"
    """Which of a turn's hints the teacher reads: the most trusted one; the one after which its top_k tokens are most
    often the policy's, over the reply or token by token (one teacher pass for each hint); any; the longest."""
    distillation: Literal["sampled", "subset", "topk"] = "topk"
    """What the teacher corrects: the sampled token; a subset of likely tokens, as the published hybrid does; or the
    divergence over the teacher's top_k tokens and the rest, which ends at the teacher and lets no mass escape."""
    subset: Literal["student", "teacher", "intersection"] = "student"
    """Whose top_k tokens "subset" corrects. A position where student and teacher have none in common is masked."""
    divergence: Divergence = "reverse_kl"
    """What "topk" makes small: reverse KL settles on what the teacher says most, forward KL covers all that it might
    say, the Jensen-Shannon divergence stands between."""
    jsd_alpha: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The teacher's share of the mixture that "jsd" measures from."""
    top_k: PositiveInt = 32
    """K: likely tokens that the teacher corrects at each position, and that hints are compared by."""
    gap_clip: PositiveFloat = 1.0
    """C: bound on the teacher's log-prob gap, nats."""
    importance_cap: PositiveFloat = 2.0
    """Truncation of the importance weight between the version that sampled a token and the one being trained."""
    max_log_ratio: PositiveFloat = 2.0
    """A turn whose reply is on average this many nats a token more or less likely to the version being trained than to
    the one that sampled it is left out: hardly any of its tokens is one that this version would have said."""
    max_session_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the largest update that one session may fill; its other turns wait for the next."""
    max_key_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The same for all sessions of one key's user, where turns of others wait too: one who floods the server takes no
    more than this of what it learns, and the others need not wait until the flood is over."""
    kl_weight: NonNegativeFloat = 0.05
    """beta: weight of the k3 estimate of the divergence from the base."""
    baseline_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Rate of the running mean reward that is subtracted; at 0 rewards stay as they are."""
    lag_versions: NonNegativeInt = 4
    """Publishes a token may trail the version being trained; older tokens are masked."""
    max_turn_tokens: PositiveInt = 4096
    """Longer turns are left out, so that an update fits in memory."""
    micro_batch_tokens: PositiveInt = 1024
    """Distinct tokens in one forward and backward pass, beside those of the update's longest turn. Turns that share a
    beginning share its tokens. A token of the built-in model takes 0.7 MB in float32 and 0.4 MB in bfloat16."""
    bfloat16: bool = False
    """Multiply in bfloat16: faster and smaller where the machine has instructions for it, and log-probs that are off by
    some hundredths of a nat a token. What is trained and its optimiser stay in float32."""
    memory_gb: PositiveFloat | None = None
    """What the trainer may take beside the base weights, in 10^9 bytes; not set: what is free when it starts. Passes
    are made smaller and longer turns are left out so that it is enough; `nextstate learn plan` shows how."""
    threads: NonNegativeInt = 0
    """CPU threads of the trainer; 0: the cores that the engine leaves."""
    seed: int = 0
    """Of the adapter's beginning."""

    @property
    def max_update_turns(self) -> int:
        """Most turns in one update: where turns have piled up, larger updates keep them from going stale."""
        return 2 * self.batch_turns

    @property
    def max_session_turns(self) -> int:
        """Most turns of one session in one update. One at least, so that every turn's time comes."""
        return max(1, int(self.max_session_share * self.max_update_turns))

    @property
    def max_key_turns(self) -> int:
        """Most turns of one key's user in one update, where turns of others wait too."""
        return max(1, int(self.max_key_share * self.max_update_turns))

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.clip_low >= 1:
            raise ValueError(f"learn.clip_low is {self.clip_low}; from 1 on, nothing holds the ratio from below")
        if self.reward_weight == 0 and self.teacher_weight == 0:
            raise ValueError("learn.reward_weight and learn.teacher_weight are both 0, so nothing would be learned")
        return self


class GateConfig(_Section):
    probe_bound: PositiveFloat | None = None
    """Largest log-prob difference between trainer and engine on the probe, nats; not set: 1e-3 in float32, else 0.5."""
    max_divergence: PositiveFloat = 1.0
    """Mean divergence from the base on the probe, nats a token, beyond which a version does not serve."""
    max_perplexity_ratio: PositiveFloat = 1.5
    """Perplexity on a small fixed set of plain texts over the base's, beyond which a version does not serve."""
    hold_out_every: NonNegativeInt = 10
    """One signed turn in so many is kept out of training, to see what a version makes of it; 0: none."""
    max_held_out: PositiveInt = 16
    """Newest of them that are measured after each update."""
    min_held_out: PositiveInt = 8
    """With fewer, that version and parent have both measured, nothing is said about preference."""
    max_preference_fall: PositiveFloat = 0.5
    """How far the margin of good held-out answers over bad ones may fall below the parent's, nats a token."""


class WatchConfig(_Section):
    enabled: bool = True
    """Go back by itself when a version is found worse than what served before it."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Chance that a version which is not worse is taken back all the same, however long it is watched."""
    min_turns: PositiveInt = 10
    """Signed verdicts that a version and what served before it must both have before anything is decided."""


class Config(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="NEXTSTATE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
        use_attribute_docstrings=True,
    )

    model: str = "smollm2-135m-instruct"
    """Hub name or folder of a causal chat model; the default is built in."""
    data: Path = Path("nextstate-data")
    """Folder of the store and the policy versions; belongs to one model and one server."""
    log: Form = "text"
    """What log lines look like; json has a field for the turn or version that a line is about."""
    serve: ServeConfig = ServeConfig()
    engine: EngineConfig = EngineConfig()
    collect: CollectConfig = CollectConfig()
    store: StoreConfig = StoreConfig()
    judge: JudgeConfig = JudgeConfig()
    learn: LearnConfig = LearnConfig()
    gate: GateConfig = GateConfig()
    watch: WatchConfig = WatchConfig()

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.data.resolve() / 'nextstate.db'}"

    @property
    def versions_dir(self) -> Path:
        return self.data / "versions"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(file: Path | None = None, **options: Any) -> Config:
    """The configuration from a TOML file, the environment and options (sections as dicts).

    Raises:
        ConfigError: a file that cannot be read, an unknown name, or a value out of range; names each of them.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"config file {file} does not exist. Nothing was started. Check the path after --config.")

    for name in os.environ:
        part = name.removeprefix("NEXTSTATE_").split("__")[0].lower()
        own = name == "NEXTSTATE_CACHE" or name.startswith("NEXTSTATE_TEST_")
        if name.startswith("NEXTSTATE_") and not own and part not in Config.model_fields:
            raise ConfigError(
                f"environment variable {name} names no setting. Nothing was started. Sections and settings are joined "
                "by two underscores: NEXTSTATE_LEARN__RANK."
            )

    class FromFile(Config):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        return FromFile(**options)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} is not valid TOML: {error}. Nothing was started.") from error
    except SettingsError as error:
        raise ConfigError(f"an environment variable is not accepted: {error}. Nothing was started.") from error
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"configuration not accepted: {problems}. Nothing was started.") from error
