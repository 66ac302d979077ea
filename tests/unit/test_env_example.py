import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from unstuck import ZombieSettings
from unstuck.settings import PREFIX

EXAMPLE = Path(__file__).parents[2] / ".env.example"
SETTING = re.compile(rf"^#({PREFIX}\w+)=(.*)$", re.MULTILINE)
ADVICE = re.compile(r"^# +(\w[\w ]+?\([\w ]+\)) +([\d.]+) +([\d.]+) +([\d.]+)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.upper().startswith(PREFIX) or name.upper() == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written_settings() -> dict[str, str]:
    return dict(SETTING.findall(EXAMPLE.read_text()))


def as_written(default: Any) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else str(default)


def test_it_lists_every_setting_in_the_order_of_the_class() -> None:
    wanted = [PREFIX + field.upper() for field in ZombieSettings.model_fields]
    assert [name for name, _ in SETTING.findall(EXAMPLE.read_text())] == wanted


def test_it_shows_the_default_of_every_setting() -> None:
    wanted = {
        PREFIX + name.upper(): as_written(field.default)
        for name, field in ZombieSettings.model_fields.items()
    }
    assert written_settings() == wanted


def test_a_setting_without_a_value_says_how_it_is_derived() -> None:
    lines = EXAMPLE.read_text().splitlines()
    empty = [at for at, line in enumerate(lines) if SETTING.match(line) and line.endswith("=")]
    assert len(empty) == 5
    assert all("derived: " in lines[at - 1] for at in empty)


def test_every_setting_has_a_line_of_advice_above_it() -> None:
    lines = EXAMPLE.read_text().splitlines()
    settings = [at for at, line in enumerate(lines) if SETTING.match(line)]
    assert all(re.match(r"# \w.{20,}", lines[at - 1]) for at in settings)


def test_every_line_is_a_comment_so_that_a_copy_changes_nothing() -> None:
    assert all(not line or line.startswith("#") for line in EXAMPLE.read_text().splitlines())


@pytest.mark.parametrize("written_out", [False, True])
def test_loading_it_gives_the_defaults(tmp_path: Path, *, written_out: bool) -> None:
    bare = ZombieSettings(_env_file=None)
    text = EXAMPLE.read_text()
    (tmp_path / ".env").write_text(SETTING.sub(r"\1=\2", text) if written_out else text)
    assert ZombieSettings() == bare


def test_the_file_that_is_loaded_is_really_read(tmp_path: Path) -> None:
    """Or the test above would pass for any file."""
    lines = [f"{name}=7" for name in written_settings() if name.endswith("_RESETS")]
    url = "ZOMBIE_DATABASE_URL=sqlite+aiosqlite://"
    (tmp_path / ".env").write_text("\n".join([*lines, url]))
    settings = ZombieSettings()
    assert settings.max_resets == 7
    assert settings.database_url == SecretStr("sqlite+aiosqlite://")


def test_every_row_of_the_advice_is_accepted() -> None:
    rows = ADVICE.findall(EXAMPLE.read_text())
    assert [work for work, *_ in rows] == [
        "fast (seconds)",
        "medium (minutes)",
        "long (an hour)",
        "very long (many hours)",
    ]
    for work, heartbeat, threshold, interval in rows:
        settings = ZombieSettings(
            heartbeat_interval_seconds=heartbeat,
            stuck_threshold_minutes=threshold,
            cleanup_interval_minutes=interval,
        )
        assert settings.threshold >= 3 * float(heartbeat), work
        assert settings.interval <= settings.threshold, work
