from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import CHAR, BigInteger, Column, Dialect, Enum, Integer, String, Uuid
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeDecorator, TypeEngine

from unstuck.identity import is_supported, read_key, write_key

INT = Column("id", BigInteger)
UUID_ = Column("id", Uuid)
TEXT = Column("id", String)

# PostgreSQL's text has no NUL, and nothing can encode half a surrogate pair.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
awkward = st.text(st.sampled_from([",", "\\", "'", '"', "%", " ", "\n", "ü", "😀", "a"]))


class Guid(TypeDecorator[UUID]):
    """SQLAlchemy's own recipe: a UUID on PostgreSQL, text elsewhere."""

    impl = CHAR
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        own = postgresql.UUID() if dialect.name == "postgresql" else CHAR(36)
        return dialect.type_descriptor(own)


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_integer_survives(value: int) -> None:
    assert write_key([INT], value) == str(value)
    assert read_key([INT], str(value)) == (value,)


@given(st.uuids())
def test_a_uuid_survives_and_is_written_with_hyphens(value: UUID) -> None:
    for column in (UUID_, Column("id", Guid), Column("id", postgresql.UUID(as_uuid=False))):
        assert write_key([column], value) == str(value)
        assert read_key([column], str(value)) == (value,)


@given(st.uuids())
def test_every_way_to_write_a_uuid_is_the_same_key(value: UUID) -> None:
    for written in (value.hex, str(value).upper(), value.urn):
        assert write_key([UUID_], written) == str(value)


@given(texts | awkward)
@example("a,b")
@example("\\")
@example("")
def test_a_string_is_written_as_it_is(value: str) -> None:
    assert write_key([TEXT], value) == value
    assert read_key([TEXT], value) == (value,)


@given(st.lists(texts | awkward, min_size=2, max_size=4))
@example(["", ""])
@example(["\\", ","])
@example([",", "\\,"])
@example(["a\\", "b"])
def test_a_composite_key_survives(parts: list[str]) -> None:
    columns = [TEXT] * len(parts)
    assert read_key(columns, write_key(columns, parts)) == tuple(parts)


@given(st.integers(-(2**31), 2**31 - 1), st.uuids(), texts | awkward)
def test_a_mixed_key_survives(number: int, uuid: UUID, text: str) -> None:
    columns = [INT, UUID_, TEXT]
    assert read_key(columns, write_key(columns, (number, uuid, text))) == (number, uuid, text)


@given(st.lists(awkward, min_size=2, max_size=2), st.lists(awkward, min_size=2, max_size=2))
@example(["a,", "b"], ["a", ",b"])
@example(["a\\", "b"], ["a", "\\b"])
def test_two_keys_never_share_a_text(left: list[str], right: list[str]) -> None:
    columns = [TEXT, TEXT]
    assert (write_key(columns, left) == write_key(columns, right)) == (left == right)


def test_a_composite_key_is_written_as_people_would() -> None:
    assert write_key([INT, TEXT], (7, "a,b\\c")) == "7,a\\,b\\\\c"


@pytest.mark.parametrize("record", ["5", 5, (5,), [5]])
def test_a_key_may_be_given_as_text_value_or_tuple(record: object) -> None:
    assert read_key([INT], record) == (5,)


@pytest.mark.parametrize(
    ("columns", "record"),
    [
        ([INT], "five"),
        ([INT], ""),
        ([INT], 5.5),
        ([INT], None),
        ([INT], True),
        ([INT], "1_000"),
        ([INT], "\u0663"),
        ([INT], 2**63),
        ([INT], (1, 2)),
        ([UUID_], "not-a-uuid"),
        ([UUID_], 5),
        ([TEXT, TEXT], "only one"),
        ([TEXT, TEXT], "a,b,c"),
        ([TEXT], None),
    ],
)
def test_what_cannot_be_a_key_is_refused(columns: list[Column[Any]], record: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_key(columns, record)


@pytest.mark.parametrize(
    ("kind", "supported"),
    [(Integer, True), (Uuid, True), (String, True), (Guid, True), (Enum("a", "b"), False)],
)
def test_which_types_can_be_keys(kind: Any, *, supported: bool) -> None:
    assert is_supported(Column("id", kind)) is supported
