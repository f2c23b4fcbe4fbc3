"""Makes the tables of docs/reference/lake.md from the code: `python tests/docs/lake_page.py` writes them into the page."""

from __future__ import annotations

import sys
from pathlib import Path

from omniq.spark.lake.tables import TABLES, LakeTable

BEGIN = "<!-- The tables are made from the code by tests/docs/lake_page.py. -->"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "lake.md"


def section(table: LakeTable) -> str:
    rows = [f"| `{column.name}` | {column.type} | {column.doc} |" for column in table.columns]
    head = f"### `{table.name}`\n\n{table.layer.capitalize()}. One row: {table.grain}. Folders by `{table.partition}`."
    return "\n".join([head, "", "| column | type | what it is |", "|---|---|---|", *rows])


def tables() -> str:
    return BEGIN + "\n\n" + "\n\n".join(section(table) for table in TABLES.values()) + "\n"


def main() -> None:
    before, _, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + tables())
    print(f"wrote {PAGE.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
