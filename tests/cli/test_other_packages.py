"""A driver of another package is named by its URL like our own: in code, in the environment, by commands and for Spark."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.shell import JOBS, Shell

from omniq import BaseStorage, ConfigError, FileStorage, MemoryStorage, Settings, load_settings
from omniq.spark.address import address_of, anchored, identity, is_file, must_reach
from omniq.storage.url import OWN, schemes

MODULE = """
import msgspec

from omniq import FileStorage
from omniq.storage.url import options_of


class ShelfStorage(FileStorage):
    default_url = "shelf:books"

    def __init__(self, url=default_url, **options):
        options_of(url, "colour")
        super().__init__(url.partition(":")[2].partition("?")[0], durability="process", **options)

    @property
    def url(self):
        return f"shelf:{self.path}"


def open_library(url, **options):
    storage = ShelfStorage("shelf:/library", **options)
    storage.capabilities = msgspec.structs.replace(storage.capabilities, local=False)
    return storage
"""
ENTRIES = """[omniq.storage]
shelf = omniq_shelf:ShelfStorage
library = omniq_shelf:open_library
lost = omniq_shelf:LostStorage
attic = omniq_attic:AtticStorage
sqlite = omniq_shelf:ShelfStorage
"""
ATTIC = "import a_client_of_attics\n"
METADATA = "Metadata-Version: 2.1\nName: omniq-shelf\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the package."""
    folder = tmp_path_factory.mktemp("packages")
    wheel, info = folder / "omniq_shelf-1.0-py3-none-any.whl", "omniq_shelf-1.0.dist-info"
    files = {
        "omniq_shelf.py": MODULE,
        "omniq_attic.py": ATTIC,
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": ENTRIES,
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
        packed.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    install = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*install, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


@pytest.fixture
def installed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "omniq_shelf", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shell(site: Path, tmp_path: Path) -> Shell:
    (tmp_path / "jobs.py").write_text(JOBS)
    made = Shell(tmp_path, "shelf:store")
    made.environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return made


@pytest.mark.usefixtures("installed")
def test_a_url_opens_it_with_its_options(tmp_path: Path) -> None:
    storage = BaseStorage.from_url("shelf:queue?colour=red", events=False)
    assert type(storage).__name__ == "ShelfStorage"
    assert (storage.place, storage.events_on) == (str(tmp_path / "queue"), False)
    with pytest.raises(ConfigError, match="unknown option 'size'; known: colour"):
        BaseStorage.from_url("shelf:queue?size=5")


@pytest.mark.usefixtures("installed")
def test_the_entry_may_be_a_function() -> None:
    assert BaseStorage.from_url("library://reading-room").place == "/library"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({"OMNIQ_DB_URL": "shelf:queue"}, "shelf:queue"),
        ({"OMNIQ_BACKEND": "shelf", "OMNIQ_DB_URL": "shelf:queue"}, "shelf:queue"),
        ({"OMNIQ_BACKEND": "shelf"}, "shelf:books"),
    ],
)
def test_the_environment_names_it(environment: dict[str, str], url: str) -> None:
    settings = load_settings(environment)
    assert (settings.backend, settings.url) == ("shelf", url)


@pytest.mark.usefixtures("installed")
def test_a_backend_without_a_place_of_its_own_asks_for_a_url() -> None:
    with pytest.raises(ConfigError, match=r"backend 'library' needs database_url \(OMNIQ_DB_URL\), which begins with library:"):
        _ = Settings(backend="library").url


@pytest.mark.usefixtures("installed")
def test_an_unknown_scheme_is_told_all_that_are_registered() -> None:
    for name in ("shelf", "library", *OWN):
        with pytest.raises(ConfigError, match=rf"registered schemes: .*\b{name}\b"):
            BaseStorage.from_url("cellar://x")
        with pytest.raises(ConfigError, match=rf"OMNIQ_BACKEND=.*\b{name}\b"):
            load_settings({"OMNIQ_BACKEND": "cellar"})


@pytest.mark.usefixtures("installed")
def test_a_driver_that_cannot_be_imported_is_named_with_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"AtticStorage cannot .*install what brings 'a_client_of_attics'") as caught:
        BaseStorage.from_url("attic://me:secret@host")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"omniq_shelf:LostStorage cannot .*install what brings 'omniq_shelf'"):
        BaseStorage.from_url("lost:x")


@pytest.mark.usefixtures("installed")
def test_another_package_does_not_replace_our_own(tmp_path: Path) -> None:
    assert schemes()["sqlite"] == OWN["sqlite"]
    assert BaseStorage.from_url(f"sqlite:///{tmp_path}/q.db").place == f"{tmp_path}/q.db"


@pytest.mark.usefixtures("installed")
def test_spark_asks_the_driver_whether_other_machines_reach_it(tmp_path: Path) -> None:
    assert anchored("shelf:queue?colour=red") == f"shelf:{tmp_path}/queue?colour=red"
    assert is_file("shelf:queue")
    with pytest.raises(ConfigError, match="keep the tasks in Redis"):
        must_reach("shelf:queue", local=False)
    assert address_of("shelf:queue", "s").machine != ""
    (tmp_path / "queue").mkdir()
    assert identity("shelf:queue") is not None
    must_reach("library://room", local=False)
    assert (anchored("library://room"), address_of("library://room", "s").machine) == ("library://room", "")


def test_commands_work_on_it(shell: Shell) -> None:
    assert "no store at shelf:store" in shell("queues").sentence()
    task = shell.enqueue("jobs:add", "[2, 3]")
    shell.ok("worker", "jobs", "--drain-and-exit", store=False, OMNIQ_DB_URL="shelf:store")
    assert shell.ok("result", task).out.split()[-1] == "5"
    assert {row["check"] for row in shell.ok("doctor", "--json").json()} >= {"disk"}


def test_a_source_tree_without_metadata_opens_our_own_stores(tmp_path: Path) -> None:
    code = "import sys; sys.modules['importlib.metadata'] = None\n"
    code += "import omniq\nprint([type(omniq.BaseStorage.from_url(u)).__name__ for u in ('memory://', 'file:q')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([MemoryStorage.__name__, FileStorage.__name__])
