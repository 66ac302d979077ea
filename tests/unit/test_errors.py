import re

import pytest

from unstuck.errors import describe, mask


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("cannot reach postgresql://app:s3cret@db/app", "cannot reach postgresql://app:***@db/app"),
        ("postgresql://app:s3/cr@et@db/app", "postgresql://app:***@db/app"),
        ("host=db password=s3cret user=app", "host=db password=*** user=app"),
        ("postgresql://db/app?password=s3cret&x=1", "postgresql://db/app?password=***&x=1"),
        ("{'password': 's3cret'}", "{'password': '***'}"),
        ("password authentication failed for user app",) * 2,
        ("<class 'asyncpg.exceptions.LockError'>: lock timeout", "lock timeout"),
        ("first line\nSELECT everything", "first line"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_told_in_one_line_without_its_secrets(said: str, told: str) -> None:
    assert describe(ValueError(said)) == told


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("password='a,b;c' host=db", "password='***' host=db"),
        ('password="se cret" host=db', 'password="***" host=db'),
        ("password = 'se cret'", "password = '***'"),
        ("{'password': 'a,b;c', 'host': 'db'}", "{'password': '***', 'host': 'db'}"),
        ("PGPASSWORD=x psql", "PGPASSWORD=*** psql"),
        ("postgresql://u:p@h", "postgresql://u:***@h"),
        (
            "from redis://:p@h to postgresql://u:p@h/d",
            "from redis://:***@h to postgresql://u:***@h/d",
        ),
        ("line 1: pwd=x\nline 2: passwd: y", "line 1: pwd=***\nline 2: passwd: ***"),
        ("password='***' host=db",) * 2,
        ("postgresql://h/d has no password",) * 2,
    ],
)
def test_what_an_error_says_is_masked_wherever_it_names_a_password(said: str, told: str) -> None:
    assert re.sub(r"\*+", "***", mask(said)) == told  # however many stars
