"""The lake: history of stores as Parquet, with tables for analysis."""
