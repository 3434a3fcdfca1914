"""Options, declared once for the command line and the Python API."""
