"""Makes the tables of docs/reference/lake.md from the code: `python tests/docs/lake_page.py` writes them into the page."""

from __future__ import annotations

import sys
from pathlib import Path

from omniq.spark.lake.report.samples import ALL
from omniq.spark.lake.tables import TABLES, LakeTable

BEGIN = "<!-- The tables are made from the code by tests/docs/lake_page.py. -->"
SAMPLES = "<!-- This table is made from the code by tests/docs/lake_page.py. -->\n", "<!-- Here it ends. -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "lake.md"


def section(table: LakeTable) -> str:
    rows = [f"| `{column.name}` | {column.type} | {column.doc} |" for column in table.columns]
    head = f"### `{table.name}`\n\n{table.layer.capitalize()}. One row: {table.grain}. Folders by `{table.partition}`."
    return "\n".join([head, "", "| column | type | what it is |", "|---|---|---|", *rows])


def samples() -> str:
    rows = [f"| {sample.needed_for} | {sample.least} {sample.of} |" for sample in ALL]
    return "\n".join([SAMPLES[0], "| for | at least |", "|---|---|", *rows, "", SAMPLES[1]])


def tables() -> str:
    return BEGIN + "\n\n" + "\n\n".join(section(table) for table in TABLES.values()) + "\n"


def main() -> None:
    before, _, _ = PAGE.read_text().partition(BEGIN)
    head, _, rest = before.partition(SAMPLES[0])
    PAGE.write_text(head + samples() + rest.partition(SAMPLES[1])[2] + tables())
    print(f"wrote {PAGE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
