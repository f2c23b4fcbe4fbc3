"""The report of a lake: from its tables to one page."""
