import os
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from unstuck import UnstuckError, ZombieSettings
from unstuck.errors import SettingsError
from unstuck.settings import PREFIX, unknown_variables


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.upper().startswith(PREFIX) or name.upper() == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("cleanup_enabled", True),
        ("stuck_threshold_minutes", 60),
        ("cleanup_interval_minutes", 15),
        ("database_url", None),
        ("max_resets", 3),
        ("backoff_base_seconds", 60),
        ("backoff_max_seconds", 3600),
        ("lease_grace_seconds", 60),
        ("batch_size", 1000),
        ("max_per_sweep", 10_000),
        ("mass_stall_records", 500),
        ("mass_stall_window_minutes", 60),
        ("mass_stall_spread_seconds", 300),
        ("sweep_timeout_seconds", None),
        ("lock_timeout_seconds", 5),
        ("statement_timeout_seconds", 60),
        ("heartbeat_interval_seconds", None),
        ("retention_events_days", 90),
        ("retention_records_days", 30),
        ("retention_claims_days", 7),
        ("reset_message", "Auto-reset from stuck Processing state"),
    ],
)
def test_the_defaults(field: str, default: object) -> None:
    assert getattr(ZombieSettings(), field) == default


def test_minutes_are_told_in_seconds() -> None:
    settings = ZombieSettings()
    assert (settings.threshold, settings.interval) == (3600, 900)


@pytest.mark.parametrize(("minutes", "seconds"), [(15, 45), (1, 3), (60, 60)])
def test_jitter_is_a_twentieth_of_the_interval_and_at_most_a_minute(
    minutes: float, seconds: float
) -> None:
    assert ZombieSettings(cleanup_interval_minutes=minutes).jitter == seconds


@pytest.mark.parametrize(("minutes", "seconds"), [(15, 600), (10, 540), (0.5, 27)])
def test_a_sweep_ends_before_the_next_one_is_due(minutes: float, seconds: float) -> None:
    assert ZombieSettings(cleanup_interval_minutes=minutes).sweep_timeout == seconds


@pytest.mark.parametrize(("threshold", "seconds"), [(3600, 30), (90, 30), (60, 20), (3, 1)])
def test_a_heart_beats_three_times_before_it_counts_as_dead(
    threshold: float, seconds: float
) -> None:
    assert ZombieSettings().heartbeat_interval(threshold) == seconds


def test_what_is_said_is_not_derived() -> None:
    settings = ZombieSettings(
        cleanup_jitter_seconds=0, sweep_timeout_seconds=50, heartbeat_interval_seconds=7
    )
    assert settings.jitter == 0
    assert settings.sweep_timeout == 50
    assert settings.heartbeat_interval(3600) == 7


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOMBIE_CLEANUP_ENABLED", "false")
    monkeypatch.setenv("ZOMBIE_BATCH_SIZE", "10")
    monkeypatch.setenv("zombie_max_resets", "9")
    settings = ZombieSettings()
    assert (settings.cleanup_enabled, settings.batch_size, settings.max_resets) == (False, 10, 9)


def test_minutes_may_be_fractions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOMBIE_STUCK_THRESHOLD_MINUTES", "0.25")
    monkeypatch.setenv("ZOMBIE_CLEANUP_INTERVAL_MINUTES", "0.05")
    settings = ZombieSettings()
    assert (settings.threshold, settings.interval) == (15, 3)


def test_the_env_file_is_read_and_the_environment_wins_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path(".env").write_text("ZOMBIE_MAX_RESETS=5\nZOMBIE_BATCH_SIZE=20\nSECRET_KEY=of-the-host\n")
    monkeypatch.setenv("ZOMBIE_BATCH_SIZE", "30")
    settings = ZombieSettings()
    assert (settings.max_resets, settings.batch_size) == (5, 30)


def test_a_keyword_wins_over_environment_and_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("ZOMBIE_MAX_RESETS=5\n")
    monkeypatch.setenv("ZOMBIE_MAX_RESETS", "6")
    assert ZombieSettings(max_resets=7).max_resets == 7


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("ZOMBIE_RETENTION_EVENTS_DAYS=\nZOMBIE_BATCH_SIZE=20\n")
    monkeypatch.setenv("ZOMBIE_BATCH_SIZE", "")
    monkeypatch.setenv("ZOMBIE_DATABASE_URL", "")
    monkeypatch.setenv("DATABASE_URL", "sqlite+aiosqlite:///host.db")
    settings = ZombieSettings()
    assert (settings.retention_events_days, settings.batch_size) == (90, 20)
    assert settings.database_url == SecretStr("sqlite+aiosqlite:///host.db")


@pytest.mark.parametrize("word", ["none", "None", " NONE "])
def test_none_keeps_for_ever(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("ZOMBIE_RETENTION_EVENTS_DAYS", word)
    assert ZombieSettings().retention_events_days is None


def test_settings_do_not_change() -> None:
    settings = ZombieSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.max_resets = 4


def test_a_refusal_is_an_error_of_unstuck_and_a_value_error() -> None:
    with pytest.raises(SettingsError) as refused:
        ZombieSettings(max_resets=-1)
    assert isinstance(refused.value, UnstuckError)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("ZOMBIE_MAX_RESET", "ZOMBIE_MAX_RESETS"),
        ("ZOMBIE_CLEANUP_INTERVAL", "ZOMBIE_CLEANUP_INTERVAL_MINUTES"),
        ("zombie_batchsize", "ZOMBIE_BATCH_SIZE"),
    ],
)
def test_an_unknown_variable_gets_a_sentence_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, wrong: str, near: str
) -> None:
    monkeypatch.setenv(wrong, "1")
    (sentence,) = unknown_variables()
    assert sentence.startswith(f"{wrong.upper()} is not a setting of unstuck")
    assert f"did you mean {near!r}?" in sentence


def test_an_unknown_variable_in_the_env_file_is_told_as_well() -> None:
    Path(".env").write_text("ZOMBIE_MAX_RESET=1\nDATABASE_URL=x\nOTHER=1\n")
    (sentence,) = unknown_variables()
    assert sentence.startswith("ZOMBIE_MAX_RESET is not a setting")


def test_known_variables_get_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOMBIE_MAX_RESETS", "1")
    monkeypatch.setenv("zombie_batch_size", "1")
    assert unknown_variables() == []


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"^batchsize= is not .* mean 'batch_size'\?"):
        ZombieSettings(batchsize=3)
