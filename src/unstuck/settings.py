"""The settings, read from the environment and `.env` under the prefix ZOMBIE_.

What cannot work is refused at start, in a sentence that names the variable, its value and the rule.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, DotEnvSettingsSource, SettingsConfigDict

from unstuck.errors import SettingsError, nearest

PREFIX = "ZOMBIE_"
ENV_FILE = ".env"
SPOOLS = ("file://", "redis://", "rediss://", "unix://")

# What PostgreSQL still takes: an interval that now() can be moved by, milliseconds, a LIMIT.
_MOST = 1_000_000_000
_MOST_TIMEOUT_SECONDS = 2_000_000
_MOST_RESETS = 1_000_000


def _none_if_said(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def _names_a_spool(url: SecretStr | None) -> SecretStr | None:
    said = "" if url is None else url.get_secret_value()
    if re.match(r"\w+:/", said) and not said.startswith(SPOOLS):
        known = f"{', '.join(SPOOLS[:-1])} or {SPOOLS[-1]}"
        raise ValueError(f"must be a folder, or begin with {known}")
    return url


Positive = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)]
Timeout = Annotated[float, Field(gt=0, le=_MOST_TIMEOUT_SECONDS, allow_inf_nan=False)]
Optional = Annotated[Positive | None, BeforeValidator(_none_if_said)]


class ZombieSettings(BaseSettings):
    """Every setting with its default; `.env.example` says how to choose them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )

    cleanup_enabled: bool = True
    stuck_threshold_minutes: Positive = 60
    cleanup_interval_minutes: Positive = 15
    cleanup_jitter_seconds: Annotated[NotNegative | None, BeforeValidator(_none_if_said)] = None
    first_sweep_seconds: NotNegative = 5
    database_url: SecretStr | None = None

    max_resets: Annotated[int, Field(ge=0, le=_MOST_RESETS)] = 3
    backoff_base_seconds: NotNegative = 60
    backoff_max_seconds: NotNegative = 3600
    lease_grace_seconds: NotNegative = 60
    reset_message: Annotated[str, Field(min_length=1)] = "Auto-reset from stuck Processing state"

    batch_size: Annotated[int, Field(ge=1, le=5000)] = 1000
    max_per_sweep: Annotated[int, Field(ge=1, le=_MOST)] = 10_000
    sweep_timeout_seconds: Optional = None
    lock_timeout_seconds: Timeout = 5
    statement_timeout_seconds: Timeout = 60

    mass_stall_records: Annotated[int, Field(ge=0, le=_MOST)] = 500
    mass_stall_window_minutes: Positive = 60
    mass_stall_spread_seconds: NotNegative = 300

    heartbeat_interval_seconds: Optional = None
    hung_after_minutes: Optional = 360
    session_timeout_seconds: Timeout = 30
    session_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    session_wait_seconds: NotNegative = 0.5
    session_jitter_seconds: NotNegative = 0.5
    breaker_failures: Annotated[int, Field(ge=0, le=_MOST)] = 5
    breaker_reset_seconds: NotNegative = 30
    shutdown_timeout_seconds: Timeout = 10
    spool_url: Annotated[SecretStr | None, AfterValidator(_names_a_spool)] = None

    retention_events_days: Optional = 90
    retention_records_days: Optional = 30
    retention_claims_days: Optional = 7

    def __init__(self, **values: Any) -> None:
        said = _environment(values.get("_env_file", ENV_FILE))
        _refuse_unknown(values)
        if "DATABASE_URL" in said and f"{PREFIX}DATABASE_URL" not in said:
            values.setdefault("database_url", said["DATABASE_URL"])
        try:
            super().__init__(**values)
        except ValidationError as invalid:
            said |= {_variable(name): value for name, value in values.items()}
            raise SettingsError(_explain(invalid, said)) from None

    @model_validator(mode="after")
    def _make_sense_together(self) -> Self:
        beat, threshold = self.heartbeat_interval_seconds, self.stuck_threshold_minutes * 60
        if beat is not None and threshold < 3 * beat:
            raise ValueError(
                f"{PREFIX}STUCK_THRESHOLD_MINUTES={self.stuck_threshold_minutes:g} must be at "
                f"least 3 x {PREFIX}HEARTBEAT_INTERVAL_SECONDS={beat:g} (that is {beat / 20:g} "
                "minutes), or a beat that is merely late counts as death"
            )
        timeout, interval = self.sweep_timeout_seconds, self.cleanup_interval_minutes * 60
        if timeout is not None and timeout >= interval:
            raise ValueError(
                f"{PREFIX}SWEEP_TIMEOUT_SECONDS={timeout:g} must be below "
                f"{PREFIX}CLEANUP_INTERVAL_MINUTES={self.cleanup_interval_minutes:g} "
                f"({interval:g} seconds), or a sweep that hangs swallows the next one"
            )
        jitter = self.cleanup_jitter_seconds
        if jitter is not None and jitter >= interval:
            raise ValueError(
                f"{PREFIX}CLEANUP_JITTER_SECONDS={jitter:g} must be below "
                f"{PREFIX}CLEANUP_INTERVAL_MINUTES={self.cleanup_interval_minutes:g} "
                f"({interval:g} seconds)"
            )
        if self.backoff_max_seconds < self.backoff_base_seconds:
            raise ValueError(
                f"{PREFIX}BACKOFF_MAX_SECONDS={self.backoff_max_seconds:g} must not be below "
                f"{PREFIX}BACKOFF_BASE_SECONDS={self.backoff_base_seconds:g}"
            )
        if self.max_per_sweep < self.batch_size:
            raise ValueError(
                f"{PREFIX}MAX_PER_SWEEP={self.max_per_sweep} must not be below "
                f"{PREFIX}BATCH_SIZE={self.batch_size}"
            )
        return self

    @property
    def threshold(self) -> float:
        return self.stuck_threshold_minutes * 60

    @property
    def interval(self) -> float:
        return self.cleanup_interval_minutes * 60

    @property
    def jitter(self) -> float:
        """Replicas that were started together should not sweep together."""
        said = self.cleanup_jitter_seconds
        return min(60.0, self.interval / 20) if said is None else said

    @property
    def sweep_timeout(self) -> float:
        said = self.sweep_timeout_seconds
        return min(600.0, self.interval * 0.9) if said is None else said

    def heartbeat_interval(self, threshold: float) -> float:
        """Seconds between beats for work that counts as dead after `threshold` seconds."""
        said = self.heartbeat_interval_seconds
        return min(30.0, threshold / 3) if said is None else said


def unknown_variables() -> list[str]:
    """A sentence for each ZOMBIE_ variable that no setting reads: most likely a slip of the pen."""
    known = {_variable(name) for name in ZombieSettings.model_fields}
    return [
        f"{name} is not a setting of unstuck: {nearest(name, known)}."
        for name in sorted(_environment(ENV_FILE))
        if name.startswith(PREFIX) and name not in known
    ]


def _refuse_unknown(values: dict[str, Any]) -> None:
    for name in values.keys() - ZombieSettings.model_fields.keys():
        if not name.startswith("_"):  # those are pydantic's own, such as _env_file
            known = nearest(name, ZombieSettings.model_fields)
            raise SettingsError(f"{name}= is not a setting of unstuck: {known}.")


def _environment(env_file: Any) -> dict[str, Any]:
    """What the environment says, and `.env` below it; what is empty says nothing."""
    sources = (DotEnvSettingsSource(ZombieSettings, env_file).env_vars, os.environ)
    return {name.upper(): value for source in sources for name, value in source.items() if value}


def _variable(field: str) -> str:
    return PREFIX + field.upper()


def _explain(invalid: ValidationError, said: dict[str, Any]) -> str:
    sentences = []
    for error in invalid.errors(include_url=False, include_context=False, include_input=False):
        rule = error["msg"].removeprefix("Value error, ")
        if not error["loc"]:
            sentences.append(f"{rule}.")
            continue
        variable = _variable(str(error["loc"][0]))
        secret = variable.endswith("_URL") or variable not in said
        value = "" if secret else f"={said[variable]}"
        sentences.append(f"{variable}{value} is refused: {rule[:1].lower()}{rule[1:]}.")
    return " ".join(dict.fromkeys(sentences))
