"""Settings in code and from the environment."""

from pathlib import Path

import pytest

from omniq import AsyncOmniQ, ConfigError, MemoryStorage, OmniQ, Settings, SQLiteStorage, load_settings
from omniq.backoff import Backoff
from omniq.storage.base import BaseStorage

DAY = 86_400


def test_settings_need_no_argument_and_have_the_promised_defaults() -> None:
    settings = Settings()
    assert settings.backend == "sqlite"
    assert settings.url == "sqlite:///omniq.db"
    assert settings.default_timeout == 300
    assert settings.default_max_retries == 3
    assert settings.result_ttl_seconds == 86_400
    assert settings.serializer == "msgspec"
    assert settings.lease == 30
    assert settings.grace == 25
    assert settings.backoff_base == 1
    assert settings.events is True
    assert settings.events_max_age == 7 * DAY
    assert settings.events_max_count == 1_000_000
    assert settings.idempotency_ttl == DAY
    assert settings.unknown_function_s == 3600
    assert settings.dead_letter_ttl == 30 * DAY
    assert settings.default_queue == "default"


def test_an_empty_environment_gives_the_defaults() -> None:
    assert load_settings({}) == Settings()


def test_load_settings_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQ_DEFAULT_MAX_RETRIES", "9")
    assert load_settings().default_max_retries == 9


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("OMNIQ_BACKEND", "memory", "backend", "memory"),
        ("OMNIQ_BACKEND", "SQLite", "backend", "sqlite"),
        ("OMNIQ_DB_URL", "sqlite:///q.db", "database_url", "sqlite:///q.db"),
        ("OMNIQ_BASE_DIR", "data", "base_dir", "data"),
        ("OMNIQ_DEFAULT_TIMEOUT", "2.5", "default_timeout", 2.5),
        ("OMNIQ_DEFAULT_MAX_RETRIES", "0", "default_max_retries", 0),
        ("OMNIQ_RESULT_TTL", "60", "result_ttl_seconds", 60),
        ("OMNIQ_RESULT_TTL", "0", "result_ttl_seconds", 0),
        ("OMNIQ_EVENTS_MAX_AGE", "3600", "events_max_age", 3600),
        ("OMNIQ_EVENTS_MAX_COUNT", "5000", "events_max_count", 5000),
        ("OMNIQ_UNKNOWN_FUNCTION_S", "0", "unknown_function_s", 0),
        ("OMNIQ_SERIALIZER", "cloudpickle", "serializer", "cloudpickle"),
        ("OMNIQ_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ],
)
def test_every_variable_sets_its_field(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(load_settings({variable: text}), field) == value


def test_an_empty_variable_counts_as_unset() -> None:
    assert load_settings({"OMNIQ_BACKEND": "", "OMNIQ_DEFAULT_TIMEOUT": "  "}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OMNIQ_BACKEND", "postgres"),
        ("OMNIQ_DB_URL", "mysql://host/db"),
        ("OMNIQ_DEFAULT_TIMEOUT", "soon"),
        ("OMNIQ_DEFAULT_TIMEOUT", "-1"),
        ("OMNIQ_DEFAULT_TIMEOUT", "0"),
        ("OMNIQ_DEFAULT_TIMEOUT", "nan"),
        ("OMNIQ_DEFAULT_TIMEOUT", "inf"),
        ("OMNIQ_DEFAULT_MAX_RETRIES", "1.5"),
        ("OMNIQ_DEFAULT_MAX_RETRIES", "-1"),
        ("OMNIQ_RESULT_TTL", "-5"),
        ("OMNIQ_UNKNOWN_FUNCTION_S", "-1"),
        ("OMNIQ_SERIALIZER", "pickle"),
        ("OMNIQ_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        load_settings({variable: text})


def test_a_redis_backend_without_a_url_names_the_variable_to_set() -> None:
    with pytest.raises(ConfigError, match="OMNIQ_DB_URL"):
        load_settings({"OMNIQ_BACKEND": "redis"})


@pytest.mark.parametrize(
    ("environment", "backend", "url"),
    [
        ({"OMNIQ_DB_URL": "memory://"}, "memory", "memory://"),
        ({"OMNIQ_DB_URL": "sqlite:///a/b.db"}, "sqlite", "sqlite:///a/b.db"),
        ({"OMNIQ_DB_URL": "sqlite:////a/b.db"}, "sqlite", "sqlite:////a/b.db"),
        ({"OMNIQ_DB_URL": "jobs.db"}, "sqlite", "sqlite:///jobs.db"),
        ({"OMNIQ_DB_URL": "/var/jobs.db"}, "sqlite", "sqlite:////var/jobs.db"),
        ({"OMNIQ_DB_URL": ":memory:"}, "sqlite", "sqlite://"),
        ({"OMNIQ_DB_URL": "redis://host:6379/0"}, "redis", "redis://host:6379/0"),
        ({"OMNIQ_DB_URL": "rediss://host:6379/0"}, "redis", "rediss://host:6379/0"),
        ({"OMNIQ_BACKEND": "memory", "OMNIQ_DB_URL": "sqlite:///x.db"}, "memory", "memory://"),
        ({"OMNIQ_BACKEND": "sqlite"}, "sqlite", "sqlite:///omniq.db"),
        ({"OMNIQ_BACKEND": "file", "OMNIQ_BASE_DIR": "/data/q"}, "file", "file:///data/q"),
        ({"OMNIQ_BASE_DIR": "/data/q"}, "file", "file:///data/q"),
    ],
)
def test_backend_and_url_resolve_together(environment: dict[str, str], backend: str, url: str) -> None:
    settings = load_settings(environment)
    assert (settings.backend, settings.url) == (backend, url)


def test_a_file_url_names_its_folder() -> None:
    settings = load_settings({"OMNIQ_DB_URL": "file:///data/q"})
    assert (settings.backend, settings.url) == ("file", "file:///data/q")


def test_a_backend_that_contradicts_the_url_is_an_error() -> None:
    with pytest.raises(ConfigError, match="OMNIQ_DB_URL"):
        load_settings({"OMNIQ_BACKEND": "sqlite", "OMNIQ_DB_URL": "redis://host/0"})


@pytest.mark.parametrize("name", ["plain.db", "with space.db", "50%20.db", "what?.db", "part#1.db", "ünï.db"])
def test_a_path_survives_the_way_through_the_url(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    storage = BaseStorage.from_url(Settings(database_url=path).url)
    assert isinstance(storage, SQLiteStorage)
    assert storage.path == path


@pytest.mark.parametrize(
    "field",
    ["lease", "backoff_base", "events_max_age", "dead_letter_ttl", "idempotency_ttl", "default_timeout", "grace"],
)
@pytest.mark.parametrize("value", [-1, float("nan"), "soon", True])
def test_nonsense_durations_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Settings(**{field: value})


@pytest.mark.parametrize("field", ["lease", "backoff_base", "default_timeout"])
def test_a_duration_of_zero_is_refused_where_it_makes_no_sense(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Settings(**{field: 0})


@pytest.mark.parametrize("value", [1.5, -1, "3"])
def test_max_retries_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match="default_max_retries"):
        Settings(default_max_retries=value)  # type: ignore[arg-type]


def test_a_default_queue_with_a_bad_name_is_refused() -> None:
    with pytest.raises(ValueError, match="queue"):
        Settings(default_queue="two words")


def test_a_default_timeout_of_none_means_no_timeout() -> None:
    assert Settings(default_timeout=None).default_timeout is None


def test_the_backoff_base_becomes_the_policy_of_tasks() -> None:
    assert Settings().backoff == ""
    assert Settings(backoff_base=0.25).backoff == str(Backoff(base_ms=250))


def test_a_password_never_shows() -> None:
    settings = Settings(backend="redis", database_url="redis://user:s3cret@host/0")
    assert "s3cret" not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        load_settings({"OMNIQ_BACKEND": "sqlite", "OMNIQ_DB_URL": "redis://user:s3cret@host/0"})
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings({"OMNIQ_DB_URL": "oracle://user:s3cret@host/0"})
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        BaseStorage.from_url("oracle://user:s3cret@host/0")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("kind", [AsyncOmniQ, OmniQ])
def test_from_env_builds_what_the_environment_names(
    kind: type[AsyncOmniQ] | type[OmniQ], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMNIQ_BACKEND", "memory")
    assert isinstance(kind.from_env().storage, MemoryStorage)
    monkeypatch.setenv("OMNIQ_BACKEND", "sqlite")
    monkeypatch.setenv("OMNIQ_DB_URL", f"sqlite:///{tmp_path}/q.db?durability=process")
    monkeypatch.setenv("OMNIQ_DEFAULT_MAX_RETRIES", "7")
    oq = kind.from_env()
    assert isinstance(oq.storage, SQLiteStorage)
    assert oq.storage.path == str(tmp_path / "q.db")
    assert oq.storage.capabilities.durability == "process"
    assert oq.settings.default_max_retries == 7


@pytest.mark.parametrize("kind", [AsyncOmniQ, OmniQ])
def test_from_env_sets_the_level_of_the_omniq_logger_alone(
    kind: type[AsyncOmniQ] | type[OmniQ], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    ours, root = logging.getLogger("omniq"), logging.getLogger()
    before, root_before = ours.level, root.level
    monkeypatch.setenv("OMNIQ_BACKEND", "memory")
    monkeypatch.setenv("OMNIQ_LOG_LEVEL", "ERROR")
    try:
        kind.from_env()
        assert ours.level == logging.ERROR
        assert root.level == root_before
    finally:
        ours.setLevel(before)


def test_the_library_adds_no_log_handler() -> None:
    import logging

    assert [h for h in logging.getLogger("omniq").handlers if not isinstance(h, logging.NullHandler)] == []


@pytest.mark.parametrize("kind", [AsyncOmniQ, OmniQ])
def test_from_url_opens_what_the_url_names(kind: type[AsyncOmniQ] | type[OmniQ], tmp_path: Path) -> None:
    assert isinstance(kind.from_url("memory://").storage, MemoryStorage)
    assert kind.from_url(f"sqlite:///{tmp_path}/q.db", settings=Settings(lease=3)).settings.lease == 3


def test_the_settings_serializer_holds_whatever_the_storage_is() -> None:
    oq = AsyncOmniQ(MemoryStorage(), settings=Settings(serializer="cloudpickle"))
    assert oq.queue.serializer.name == "cloudpickle"
    assert AsyncOmniQ(MemoryStorage()).queue.serializer.name == "json"
