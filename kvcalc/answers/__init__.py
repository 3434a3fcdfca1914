"""Questions to records, tables, charts and formulas: one file per command."""
