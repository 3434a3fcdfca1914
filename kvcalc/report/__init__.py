"""What people see: tables, exports, plots."""
