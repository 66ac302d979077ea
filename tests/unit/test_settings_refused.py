"""What cannot work is refused at start, in one sentence: the variable, its value and the rule."""

import os
import re
from pathlib import Path

import pytest

from unstuck import ZombieSettings
from unstuck.errors import SettingsError
from unstuck.settings import PREFIX

POSITIVE = [
    "STUCK_THRESHOLD_MINUTES",
    "CLEANUP_INTERVAL_MINUTES",
    "SWEEP_TIMEOUT_SECONDS",
    "LOCK_TIMEOUT_SECONDS",
    "STATEMENT_TIMEOUT_SECONDS",
    "MASS_STALL_WINDOW_MINUTES",
    "HEARTBEAT_INTERVAL_SECONDS",
    "HUNG_AFTER_MINUTES",
    "SESSION_TIMEOUT_SECONDS",
    "SHUTDOWN_TIMEOUT_SECONDS",
    "RETENTION_EVENTS_DAYS",
    "RETENTION_RECORDS_DAYS",
    "RETENTION_CLAIMS_DAYS",
]
NOT_NEGATIVE = [
    "CLEANUP_JITTER_SECONDS",
    "FIRST_SWEEP_SECONDS",
    "BACKOFF_BASE_SECONDS",
    "BACKOFF_MAX_SECONDS",
    "LEASE_GRACE_SECONDS",
    "MASS_STALL_SPREAD_SECONDS",
    "SESSION_WAIT_SECONDS",
    "SESSION_JITTER_SECONDS",
    "BREAKER_RESET_SECONDS",
]
COUNTS = [
    "MAX_RESETS",
    "BATCH_SIZE",
    "MAX_PER_SWEEP",
    "MASS_STALL_RECORDS",
    "SESSION_ATTEMPTS",
    "BREAKER_FAILURES",
]
WORDS = ["CLEANUP_ENABLED", "DATABASE_URL", "RESET_MESSAGE", "SPOOL_URL"]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.upper().startswith(PREFIX) or name.upper() == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refusal() -> str:
    with pytest.raises(SettingsError) as refused:
        ZombieSettings()
    sentence = str(refused.value)
    assert re.fullmatch(r"[^\n]*[^.\n]\.", sentence), "one line, one full stop at its end"
    assert not re.search(r"\. [A-Z]", sentence), "one sentence"
    return sentence


def refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> str:
    monkeypatch.setenv(PREFIX + variable, value)
    return refusal()


def test_every_number_is_in_one_of_these_lists() -> None:
    numbers = {PREFIX + name for name in (*POSITIVE, *NOT_NEGATIVE, *COUNTS)}
    others = {PREFIX + name for name in WORDS}
    assert numbers | others == {PREFIX + name.upper() for name in ZombieSettings.model_fields}


@pytest.mark.parametrize("value", ["0", "-1", "-0.5"])
@pytest.mark.parametrize("variable", POSITIVE)
def test_what_must_be_positive(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    sentence = refused(monkeypatch, variable, value)
    assert sentence == f"ZOMBIE_{variable}={value} is refused: input should be greater than 0."


@pytest.mark.parametrize("variable", NOT_NEGATIVE)
def test_what_must_not_be_negative(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    sentence = refused(monkeypatch, variable, "-1")
    rule = "input should be greater than or equal to 0"
    assert sentence == f"ZOMBIE_{variable}=-1 is refused: {rule}."


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("variable", [*POSITIVE, *NOT_NEGATIVE])
def test_what_must_be_finite(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    sentence = refused(monkeypatch, variable, value)
    assert sentence.startswith(f"ZOMBIE_{variable}={value} is refused: input should be ")


@pytest.mark.parametrize("variable", [*POSITIVE, *NOT_NEGATIVE])
def test_what_the_database_could_not_count_to(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    sentence = refused(monkeypatch, variable, "1e12")
    rule = "is refused: input should be less than or equal to "
    assert sentence.startswith(f"ZOMBIE_{variable}=1e12 {rule}")


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "99999999999"])
@pytest.mark.parametrize("variable", COUNTS)
def test_what_must_be_a_count(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    sentence = refused(monkeypatch, variable, value)
    assert sentence.startswith(f"ZOMBIE_{variable}={value} is refused: input should be ")


@pytest.mark.parametrize("variable", ["BATCH_SIZE", "MAX_PER_SWEEP"])
def test_a_sweep_of_nothing(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    assert refused(monkeypatch, variable, "0").startswith(f"ZOMBIE_{variable}=0 is refused: ")


@pytest.mark.parametrize("variable", ["CLEANUP_ENABLED", *POSITIVE, *NOT_NEGATIVE])
def test_garbage(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    sentence = refused(monkeypatch, variable, "an hour")
    assert sentence.startswith(f"ZOMBIE_{variable}=an hour is refused: input should be a valid ")


def test_a_value_from_the_env_file_is_named_as_well() -> None:
    Path(".env").write_text("ZOMBIE_MAX_RESETS=-4\n")
    assert refusal().startswith("ZOMBIE_MAX_RESETS=-4 is refused: ")


def test_a_value_from_a_keyword_is_named_as_well() -> None:
    with pytest.raises(SettingsError, match=r"^ZOMBIE_MAX_RESETS=-4 is refused: "):
        ZombieSettings(max_resets=-4)


def test_two_wrong_values_are_both_told() -> None:
    Path(".env").write_text("ZOMBIE_MAX_RESETS=-4\nZOMBIE_BATCH_SIZE=0\n")
    with pytest.raises(SettingsError, match=r"ZOMBIE_MAX_RESETS=-4 .*\. ZOMBIE_BATCH_SIZE=0 "):
        ZombieSettings()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"STUCK_THRESHOLD_MINUTES": "1", "HEARTBEAT_INTERVAL_SECONDS": "21"},
            "ZOMBIE_STUCK_THRESHOLD_MINUTES=1 must be at least 3 x "
            "ZOMBIE_HEARTBEAT_INTERVAL_SECONDS=21 (that is 1.05 minutes), "
            "or a beat that is merely late counts as death.",
        ),
        (
            {"SWEEP_TIMEOUT_SECONDS": "60", "CLEANUP_INTERVAL_MINUTES": "1"},
            "ZOMBIE_SWEEP_TIMEOUT_SECONDS=60 must be below ZOMBIE_CLEANUP_INTERVAL_MINUTES=1 "
            "(60 seconds), or a sweep that hangs swallows the next one.",
        ),
        (
            {"CLEANUP_JITTER_SECONDS": "60", "CLEANUP_INTERVAL_MINUTES": "1"},
            "ZOMBIE_CLEANUP_JITTER_SECONDS=60 must be below ZOMBIE_CLEANUP_INTERVAL_MINUTES=1 "
            "(60 seconds).",
        ),
        (
            {"BACKOFF_BASE_SECONDS": "10", "BACKOFF_MAX_SECONDS": "9.5"},
            "ZOMBIE_BACKOFF_MAX_SECONDS=9.5 must not be below ZOMBIE_BACKOFF_BASE_SECONDS=10.",
        ),
        (
            {"BATCH_SIZE": "10", "MAX_PER_SWEEP": "9"},
            "ZOMBIE_MAX_PER_SWEEP=9 must not be below ZOMBIE_BATCH_SIZE=10.",
        ),
    ],
)
def test_what_makes_no_sense_together(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], sentence: str
) -> None:
    for variable, value in said.items():
        monkeypatch.setenv(PREFIX + variable, value)
    assert refusal() == sentence


@pytest.mark.parametrize(
    "just_right",
    [
        {"stuck_threshold_minutes": 1, "heartbeat_interval_seconds": 20},
        {"sweep_timeout_seconds": 59.9, "cleanup_interval_minutes": 1},
        {"cleanup_jitter_seconds": 59.9, "cleanup_interval_minutes": 1},
        {"backoff_base_seconds": 10, "backoff_max_seconds": 10},
        {"batch_size": 10, "max_per_sweep": 10},
        {"max_resets": 0, "mass_stall_records": 0, "backoff_base_seconds": 0},
    ],
)
def test_what_just_makes_sense_is_accepted(just_right: dict[str, float]) -> None:
    settings = ZombieSettings(**just_right)
    assert {name: getattr(settings, name) for name in just_right} == just_right


@pytest.mark.parametrize("value", ["http://host/spool", "redis:/host", "s3://bucket"])
def test_a_spool_that_there_is_none_of(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    sentence = refused(monkeypatch, "SPOOL_URL", value)
    rule = "must be a folder, or begin with file://, redis://, rediss:// or unix://"
    assert sentence == f"ZOMBIE_SPOOL_URL is refused: {rule}."
