"""The reference pages are complete: every public name, error, setting, option, event, table and operation is there."""

import inspect
import re
import sqlite3
from pathlib import Path

import cli_pages
import pytest

import omniq
import omniq.client
import omniq.contract
import omniq.errors
import omniq.operations
import omniq.server
import omniq.spark
import omniq.testing
from omniq import config, models
from omniq.client.wire import PushOptions
from omniq.server import ServeOptions, atomic, looking, metrics, protocol, server, session
from omniq.spark.reading.options import READ
from omniq.spark.reading.schema import SPARK_TYPES
from omniq.spark.settings import EVERYWHERE, settings
from omniq.spark.writing.writing import WRITE
from omniq.storage import ledger
from omniq.storage.base import BaseStorage
from omniq.storage.file import changes as file_changes
from omniq.storage.file import damage as file_damage
from omniq.storage.file import folder as file_folder
from omniq.storage.file import index as file_index
from omniq.storage.file import journal as file_journal
from omniq.storage.file import lines as file_lines
from omniq.storage.file import opening as file_opening
from omniq.storage.sqlite import schema as sqlite_schema
from omniq.storage.tables import TABLES
from omniq.tasks import Options


@pytest.fixture(scope="module")
def docs(repository: Path) -> Path:
    return repository / "docs"


def code(page: Path) -> str:
    """What stands between backticks on a page, and in its code blocks."""
    text = page.read_text()
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def missing(names: object, text: str) -> list[str]:
    return [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]  # type: ignore[union-attr]


def section(page: Path, title: str) -> str:
    """The text below a heading, to the next one of the same level or above."""
    level = title.split(" ")[0]
    _, _, rest = page.read_text().partition(f"\n{title}\n")
    assert rest, f"{page.name} has no heading {title!r}"
    return re.split(rf"\n#{{1,{len(level)}}} ", rest)[0]


def test_every_public_name_is_in_the_api_reference(docs: Path) -> None:
    assert missing(omniq.__all__, code(docs / "reference/api.md")) == []
    assert missing(omniq.testing.__all__, code(docs / "reference/api.md")) == []


@pytest.mark.parametrize("kind", [omniq.OmniQ, omniq.AsyncOmniQ, omniq.TaskContext], ids=lambda kind: kind.__name__)
def test_every_public_method_is_in_the_api_reference(docs: Path, kind: type) -> None:
    # What other parts of omniq call: not for users.
    inner = {"enqueue_call", "store", "record", "batches", "unsent_progress", "on_progress"}
    names = [name for name in vars(kind) if not name.startswith("_") and name not in inner]
    assert missing(names, code(docs / "reference/api.md")) == []


def test_every_name_and_call_of_the_contract_is_in_its_page(docs: Path) -> None:
    page = docs / "reference/contract.md"
    assert missing(omniq.contract.__all__, code(page)) == []
    calls = [name for name in vars(omniq.contract.ContractClient) if not name.startswith("_")]
    fields = [*omniq.contract.Job.__struct_fields__, *omniq.contract.JobContext.__struct_fields__]
    assert missing([*calls, *fields], code(page)) == []
    for name, parameter in inspect.signature(omniq.contract.ContractClient.publish).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"{name}={parameter.default}" in page.read_text()


def test_every_error_is_in_the_reference(docs: Path) -> None:
    names = [name for name, kind in vars(omniq.errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    page = (docs / "reference/errors.md").read_text()
    assert missing(names, page) == []
    in_tables = re.findall(r"^\| \**`(\w+)`", page, re.MULTILINE)
    expected = {n for n in names if n not in ("OmniQError", "Retry", "Unrecoverable")}
    assert expected - set(in_tables) == set()


def test_the_error_tree_is_the_one_in_the_code(docs: Path) -> None:
    tree = re.search(r"OmniQError\n.*?OutcomeUnknown", (docs / "reference/errors.md").read_text(), re.DOTALL)
    drawn = re.search(r"OmniQError\n.*?OutcomeUnknown", omniq.errors.__doc__ or "", re.DOTALL)
    assert tree is not None
    assert drawn is not None
    assert [line.strip() for line in drawn[0].splitlines()] == [line.strip() for line in tree[0].splitlines()]


def test_every_setting_and_variable_is_in_the_guide(docs: Path) -> None:
    text = code(docs / "how-to/settings.md")
    assert missing(omniq.Settings.__struct_fields__, text) == []
    assert missing(config._VARIABLES, text) == []
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| `?([\w.]+)", (docs / "how-to/settings.md").read_text(), re.MULTILINE))
    for field, default in zip(omniq.Settings.__struct_fields__, omniq.Settings.__struct_defaults__ or (), strict=True):
        if default is not None:
            assert rows[field] == (f"{default:g}" if isinstance(default, float) else str(default)), field


def test_every_option_has_a_heading(docs: Path) -> None:
    headings = " ".join(re.findall(r"^## (.*)$", (docs / "how-to/options.md").read_text(), re.MULTILINE))
    assert missing([name for name in Options.__struct_fields__ if name != "schedule"], headings) == []
    assert "`schedule=" in (docs / "how-to/options.md").read_text()


def test_every_event_is_in_the_reference(docs: Path, repository: Path) -> None:
    machine = "".join(path.read_text() for path in (repository / "src/omniq/storage").rglob("*.py"))
    written = set(re.findall(r"\.(?:note|event)\(task, \"(\w+)\"", machine)) | {"retried", "expired"}
    assert len(written) >= 12
    assert missing(sorted(written), section(docs / "reference/events.md", "## Events")) == []
    assert missing(omniq.Event.__struct_fields__, section(docs / "reference/events.md", "## Fields")) == []


def test_the_pages_of_the_commands_are_made_from_their_help(docs: Path) -> None:
    made = cli_pages.pages()
    there = {path.name: path.read_text() for path in (docs / "reference/cli").glob("*.md")}
    assert sorted(made) == sorted(there)
    stale = [name for name in made if made[name] != there[name]]
    assert stale == [], "run: python tests/docs/cli_pages.py"


def test_every_command_and_option_has_words_and_an_example(docs: Path) -> None:
    overview = (docs / "reference/cli.md").read_text()
    for path, command in cli_pages.commands():
        assert command.help, f"{path} says nothing"
        assert "Example: " in command.help, f"{path} has no example"
        shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name not in cli_pages.OF_EVERY_COMMAND]
        assert [p.name for p in shown if not p.help] == [], path
        name = path.split()[1]
        assert f"[`omniq {name}`](cli/{name}.md)" in overview, name


def test_every_command_takes_a_store_and_every_reading_one_json() -> None:
    without_store = {"omniq migrate", "omniq send", "omniq spark doctor", "omniq lake pipeline run"}
    without_store |= {
        f"omniq lake {name}" for name in ["init", "build", "check", "compact", "expire", "erase", "query", "repair", "report"]
    }
    reading = {"tasks list", "tasks show", "dlq list", "queues", "groups", "result", "doctor", "bench"}
    for path, command in cli_pages.commands():
        options = {option for p in command.params for option in p.opts}
        assert "--store" in options or path in without_store, path
        if path.removeprefix("omniq ") in reading:
            assert "--json" in options, path


def test_every_verb_attribute_limit_and_error_of_the_line_protocol_is_in_the_reference(docs: Path) -> None:
    page = docs / "reference/line-protocol.md"
    verbs = [verb.decode() for verb in protocol._PARSERS] + ["DONE"]
    headings = " ".join(re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE))
    assert missing(verbs, headings) == []
    named = ("Push", "Fetch", "Ack", "Nack", "Result", "Auth")
    for command in (getattr(protocol, f"{name}Command") for name in named):
        assert missing(command.__struct_fields__, code(page)) == [], command.__name__
    limits = [name for name in ServeOptions.__struct_fields__ if name.startswith("max_")]
    assert [name for name in limits if f"`--{name.replace('_', '-')}`" not in page.read_text()] == []
    texts = [protocol.TOO_BIG, protocol.TOO_BIG_IN_TRANSACTION, protocol.NOT_ACQUIRED, protocol.NO_HEARTBEAT, protocol.STOPPING]
    sources = "".join(inspect.getsource(module) for module in (protocol, atomic, looking, session, server))
    texts += [
        re.split(r"[{:]", text)[0].strip() for text in re.findall(r'(?:ProtocolError|_refuse)\(f?["\'](.+?)["\']\)', sources)
    ]
    assert len(texts) > 15
    assert [text for text in texts if text not in page.read_text()] == []


def test_every_metric_is_in_the_guide(docs: Path) -> None:
    named = re.findall(r'"((?:masenko|omniq_server)_\w+)"', inspect.getsource(metrics))
    assert len(named) >= 10
    text = (docs / "how-to/serve.md").read_text()
    assert [name for name in named if f"`{name}" not in text] == []


def test_every_name_of_the_clients_and_the_server_is_in_the_api_reference(docs: Path) -> None:
    text = code(docs / "reference/api.md")
    assert missing(omniq.client.__all__, text) == []
    assert missing(omniq.server.__all__, text) == []
    for kind in (omniq.client.Client, omniq.client.AsyncClient):
        assert missing([name for name in vars(kind) if not name.startswith("_")], text) == []
        assert missing(inspect.signature(kind).parameters, text) == []
    assert missing(PushOptions.__annotations__, text) == []


def test_every_option_of_the_server_has_its_default_in_the_reference(docs: Path) -> None:
    page = (docs / "reference/cli/serve.md").read_text()
    for name, default in zip(ServeOptions.__struct_fields__, ServeOptions.__struct_defaults__, strict=True):
        row = re.search(rf"^\| `--{name.replace('_', '-')}.*$", page, re.MULTILINE)
        if name not in ("token", "tls_key", "backoff"):
            assert row is not None, name
            shown = f"{default:g}s" if isinstance(default, float) else str(default)
            assert default in (None, False) or f"Default {shown}." in row[0], name


def test_every_table_and_column_is_in_the_reference(docs: Path) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    sqlite_schema.migrate(connection, ":memory:")
    page = docs / "reference/sqlite-schema.md"
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert sorted(re.findall(r"^## `(\w+)`$", page.read_text(), re.MULTILINE)) == sorted(tables)
    for table in tables:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        assert missing(columns, section(page, f"## `{table}`")) == [], table
    assert f"format {sqlite_schema.VERSION}" in page.read_text()
    connection.close()


FILE_SECTIONS = {
    "## Tasks and results": [file_lines.TaskLine, models.Record, models.StoredResult, models.TaskError],
    "## Keys": [file_lines.KeyLine],
    "## Events": [file_lines.EventLine],
    "## Journal": [
        file_journal.Commit,
        file_changes.Rows,
        ledger.QueueRow,
        ledger.Lane,
        ledger.StagedRun,
        omniq.operations.WorkerInfo,
        file_index.Counters,
    ],
    "## `format.json` and `state.json`": [file_opening.Format, file_folder.Meta],
    "## Locks": [file_folder.Control],
    "## `corrupt/`": [file_damage.DamageReport],
}


@pytest.mark.parametrize("title", FILE_SECTIONS)
def test_every_field_of_a_file_is_in_the_reference(docs: Path, title: str) -> None:
    described = "\n".join(re.findall(r"`[^`\n]+`", section(docs / "reference/file-format.md", title)))
    for kind in FILE_SECTIONS[title]:
        assert missing(kind.__struct_fields__, described) == [], kind.__name__


def test_every_folder_and_the_format_of_a_file_store_are_in_the_reference(docs: Path) -> None:
    page = docs / "reference/file-format.md"
    layout = section(page, "## Layout")
    assert [name for name in file_opening.FOLDERS if f"{name}/" not in layout] == []
    told = [line.split("  ")[0] for line in file_opening.README.splitlines()]
    assert {*file_opening.FOLDERS} - {*told} == {"queue", "locks/workers"}, "in the folder's README"
    assert missing([file_opening.FORMAT_FILE, file_folder.META, "README", file_folder.WRITE_LOCK], layout) == []
    assert f"format {file_folder.FORMAT}" in page.read_text()
    for size in (file_folder.SEGMENT_BYTES, file_folder.JOURNAL_BYTES):
        assert f"{size >> 20} MiB" in page.read_text()


def test_the_contract_names_every_operation_field_and_call(docs: Path) -> None:
    page = docs / "reference/driver-contract.md"
    text = page.read_text()
    abstract = {omniq.operations.Operation, omniq.operations.OnTask, omniq.operations.Held, omniq.operations.OnRun}
    operations = [
        kind
        for kind in vars(omniq.operations).values()
        if isinstance(kind, type) and issubclass(kind, omniq.operations.Operation) and kind not in abstract
    ]
    rows = re.findall(r"^\| `(\w+)", section(page, "## 3. Operations"), re.MULTILINE)
    assert sorted(set(rows) - {"operation"}) == sorted(kind.__name__ for kind in operations)
    for kind in operations:
        if kind is not omniq.operations.Enqueue:
            assert missing(kind.__struct_fields__, text) == [], kind.__name__
    assert missing(omniq.operations.Capabilities.__struct_fields__, section(page, "## 12. What a driver may declare")) == []
    calls = [name for name in BaseStorage.__abstractmethods__ if not name.startswith("_")]
    assert missing(calls, code(page)) == []


def test_the_driver_guide_lists_what_must_be_implemented(docs: Path) -> None:
    listed = section(docs / "how-to/write-a-driver.md", "## What to implement")
    assert missing(BaseStorage.__abstractmethods__, listed) == []


def test_every_setting_of_a_spark_session_is_in_the_reference(docs: Path) -> None:
    page = docs / "reference/spark-session.md"
    rows = dict(re.findall(r"^\| \**`(spark\.[\w.]+)`.*? \| `?([\w./-]+)", page.read_text(), re.MULTILINE))
    assert {name: rows.get(name) for name in EVERYWHERE} == EVERYWHERE
    named = {name for name in settings("local[2]", Path("/tmp")) if name not in ("spark.master", "spark.app.name")}
    assert missing(sorted(named), code(page)) == []
    assert missing(inspect.signature(omniq.spark.session).parameters, section(page, "## `session`")) == []
    assert missing(["cause", "is_local", "unwrapped"], code(page)) == []


def test_every_table_column_and_option_of_the_spark_format_is_in_the_reference(docs: Path) -> None:
    page = docs / "reference/spark-format.md"
    for table, columns in TABLES.items():
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", section(page, f"### `{table}`"), re.MULTILINE)
        assert rows == [(column.name, SPARK_TYPES[column.type].lower(), column.doc) for column in columns], table
    for names, title in ((READ, "## Options for reading"), (WRITE, "## Writing")):
        listed = [
            name for cell in re.findall(r"^\| (`.*?) \|", section(page, title), re.MULTILINE) for name in cell.split(", ")
        ]
        assert sorted(listed) == sorted(f"`{name}`" for name in names)
    for function in (omniq.spark.read, omniq.spark.read_stream):
        assert missing(inspect.signature(function).parameters, code(page)) == []


def test_what_makes_tasks_of_dataframes_is_in_the_reference(docs: Path) -> None:
    page = docs / "reference/spark-tasks.md"
    for name in ("enqueue", "map_tasks", "map_stream", "replay"):
        function = getattr(omniq.spark, name)
        assert missing(inspect.signature(function).parameters, section(page, f"## `{name}`")) == [], name
    assert missing(omniq.spark.EnqueueReport.__struct_fields__, section(page, "## `enqueue`")) == []
    assert missing(omniq.spark.ReplayReport.__struct_fields__, section(page, "## `replay`")) == []


def test_the_map_of_the_design_leads_to_files_and_names_that_are_there(docs: Path, repository: Path) -> None:
    design = (docs / "explanation/design.md").read_text()
    table = design.partition("## Where to find what")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        places = [repository / "src/omniq" / path for path in re.findall(r"`([\w/]+(?:/|\.py|/\w+\.lua))`", row)]
        assert [str(place) for place in places if not place.exists()] == []
        code = "".join(place.read_text() for place in places if place.is_file())
        names = re.findall(r"`([A-Za-z_]+)`", row)
        assert [name for name in names if not re.search(rf"(def |class |function \w+[.]){name}\b", code)] == ["PUSH"] * (
            "PUSH" in row
        )
