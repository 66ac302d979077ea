import os
from pathlib import Path
from typing import Any

import pytest

from unstuck import ZombieSettings
from unstuck.errors import SettingsError
from unstuck.settings import PREFIX, unknown_variables

SECRET = "hunter2"
URL = f"postgresql+asyncpg://me:{SECRET}@db/app"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.upper().startswith(PREFIX) or name.upper() == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def url_of(settings: ZombieSettings) -> str:
    assert settings.database_url is not None
    return settings.database_url.get_secret_value()


def test_the_host_url_is_taken_where_unstuck_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", URL)
    assert url_of(ZombieSettings()) == URL


def test_the_host_url_is_taken_from_the_env_file() -> None:
    Path(".env").write_text(f"DATABASE_URL={URL}\n")
    assert url_of(ZombieSettings()) == URL


def test_the_own_url_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "sqlite+aiosqlite:///host.db")
    monkeypatch.setenv("ZOMBIE_DATABASE_URL", URL)
    assert url_of(ZombieSettings()) == URL


def test_the_own_url_in_the_env_file_wins_over_the_host_url_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", "sqlite+aiosqlite:///host.db")
    Path(".env").write_text(f"ZOMBIE_DATABASE_URL={URL}\n")
    assert url_of(ZombieSettings()) == URL


@pytest.mark.parametrize("variable", ["DATABASE_URL", "ZOMBIE_DATABASE_URL"])
def test_a_keyword_wins_over_both(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "sqlite+aiosqlite:///host.db")
    assert url_of(ZombieSettings(database_url=URL)) == URL


@pytest.mark.parametrize("variable", ["DATABASE_URL", "ZOMBIE_DATABASE_URL"])
def test_the_password_is_in_no_text_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, URL)
    settings = ZombieSettings()
    told = [repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()]
    assert url_of(settings) == URL
    assert SECRET not in "".join(told)


@pytest.mark.parametrize(
    "wrong", [{"max_resets": -1}, {"batch_size": 10, "max_per_sweep": 1}, {"database_urls": URL}]
)
def test_the_password_is_in_no_error(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    monkeypatch.setenv("ZOMBIE_DATABASE_URL", URL)
    with pytest.raises(SettingsError) as refused:
        ZombieSettings(**wrong)
    assert SECRET not in str(refused.value) + repr(refused.value)


def test_a_url_that_is_none_is_refused_without_being_told() -> None:
    with pytest.raises(SettingsError, match=r"^ZOMBIE_DATABASE_URL is refused: ") as refused:
        ZombieSettings(database_url=[URL])
    assert SECRET not in str(refused.value)


def test_a_misspelt_url_variable_is_told_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZOMBIE_DATABASEURL", URL)
    (sentence,) = unknown_variables()
    assert "did you mean 'ZOMBIE_DATABASE_URL'?" in sentence
    assert SECRET not in sentence
