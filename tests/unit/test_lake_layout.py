"""A lake's folder: versions are published at once, locks of the dead are free, numbers are kept as ranges."""

import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniq.errors import Invalid, LakeError
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.manifest import File, Manifest, TableDay, holes, joined, overlap


def put(lake: Lake, day: str, path: str, table: str = "tasks") -> None:
    with lake.change() as draft:
        manifest = draft.manifest(table)
        manifest.parts[day] = TableDay(files=[File(path, 1, 10)])
        draft.put(manifest)


def test_init_makes_a_lake_once(tmp_path: Path) -> None:
    first = Lake.init(tmp_path / "lake")
    assert Lake.init(tmp_path / "lake").about() == first.about()
    assert Lake(tmp_path / "lake").files("events") == []


def test_a_folder_with_other_things_becomes_no_lake(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(LakeError, match="is neither empty nor a lake"):
        Lake.init(tmp_path)


def test_where_there_is_no_lake_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="omniq lake init"):
        Lake(tmp_path / "nowhere")


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    about = json.loads((tmp_path / "lake.json").read_text())
    (tmp_path / "lake.json").write_text(json.dumps({**about, "format": 99, "later": []}))
    with pytest.raises(LakeError, match="has format 99"):
        lake.about()
    with pytest.raises(LakeError, match="has format 99"):
        Lake(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    put(lake, "2026-01-01", "a.parquet")
    (tmp_path / "_manifest/tasks/1.json").write_text("{")
    with pytest.raises(LakeError, match=r"tasks/1\.json cannot be read"):
        lake.files("tasks")
    (tmp_path / "lake.json").write_text("[]")
    with pytest.raises(LakeError, match=r"lake\.json cannot be read"):
        Lake(tmp_path)


def test_an_address_that_is_no_folder_is_refused() -> None:
    with pytest.raises(Invalid, match="s3a://bucket/lake"):
        Lake("s3a://bucket/lake")


def test_an_unknown_table_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"no table 'jobs'; it has events, .*capacity_hour"):
        Lake.init(tmp_path).files("jobs")


def test_all_tables_of_a_change_are_published_at_once_or_none(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    put(lake, "2026-01-01", "old.parquet")
    before = lake.current()
    with pytest.raises(ZeroDivisionError), lake.change() as draft:
        _ = draft.put(Manifest(table="tasks")), 1 / 0
    assert lake.current() == before
    with lake.change() as draft:
        for name in ("tasks", "attempts"):
            draft.put(Manifest(table=name, parts={"2026-01-02": TableDay(files=[File(f"{name}.parquet", 1, 1)])}))
    assert lake.files("tasks") == [str(tmp_path / "tasks.parquet")]
    assert lake.files("attempts") == [str(tmp_path / "attempts.parquet")]


def test_a_crash_before_current_is_replaced_leaves_the_old_version(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    put(lake, "2026-01-01", "old.parquet")
    script = f"""
import os
from omniq.spark.lake.folder import LakeFolder
from omniq.spark.lake.layout import Lake
from omniq.spark.lake.manifest import File, Manifest, TableDay
write = LakeFolder.write
def until(self, name, data):
    if name.endswith("CURRENT"): os._exit(9)
    write(self, name, data)
LakeFolder.write = until
with Lake({str(tmp_path)!r}).change() as draft:
    draft.put(Manifest(table="tasks", parts={{"2026-01-02": TableDay(files=[File("new.parquet", 1, 1)])}}))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert lake.files("tasks") == [str(tmp_path / "old.parquet")]
    put(lake, "2026-01-03", "next.parquet")  # the number that the dead one took is simply written again
    assert [Path(path).name for path in lake.files("tasks")] == ["old.parquet", "next.parquet"]


def test_files_of_some_days_only(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    for day in (1, 2, 3):
        put(lake, f"2026-01-0{day}", f"{day}.parquet")
    assert [Path(path).name for path in lake.files("tasks", [date(2026, 1, 3), date(2026, 1, 1), date(2027, 1, 1)])] == [
        "1.parquet",
        "3.parquet",
    ]


def test_one_writer_at_a_time_and_the_error_says_who(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    with lake.writer("build"):
        with pytest.raises(LakeError, match=rf"in use: build by process {os.getpid()} on .* since 20"), lake.writer("compact"):
            pass
        with lake.folder.lock("ingest-a", "ingest"):
            pass
    with lake.writer("compact"):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    lake = Lake.init(tmp_path)
    script = f"""
import sys
from omniq.spark.lake.layout import Lake
with Lake({str(tmp_path)!r}).writer("build"):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LakeError, match=f"process {holder.pid}"), lake.writer("build"):
            pass
        holder.kill()
    with lake.writer("build"):
        pass


numbers = st.sets(st.integers(1, 60))


def ranges(of: set[int]) -> list[tuple[int, int]]:
    return joined((n, n) for n in of)


def members(of: list[tuple[int, int]]) -> set[int]:
    return {n for low, high in of for n in range(low, high + 1)}


@given(numbers, numbers)
def test_ranges_hold_the_numbers_that_were_put_in(one: set[int], other: set[int]) -> None:
    both = joined([*ranges(one), *ranges(other)])
    assert members(both) == one | other
    assert all(b[0] > a[1] + 1 for a, b in pairwise(both))
    assert members(overlap(ranges(one), ranges(other))) == one & other
    missing = set(range(min(one), max(one))) - one if one else set()
    assert members(holes(ranges(one))) == missing


def test_a_part_knows_of_which_days_it_may_tell() -> None:
    def moment(day: int) -> datetime:
        return datetime(2026, 1, day, 12, tzinfo=UTC)

    part = TableDay(first=moment(2), last=moment(4))
    assert [day for day in range(1, 8) if part.touches([date(2026, 1, day)])] == [2, 3, 4]
    part.open_from = moment(6)
    assert [day for day in range(1, 8) if part.touches([date(2026, 1, day)])] == [2, 3, 4, 6, 7]
    assert not TableDay().touches([date(2026, 1, 1)])
