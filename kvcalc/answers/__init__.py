"""Answer questions with records, tables, charts and formulas: one file per command."""
