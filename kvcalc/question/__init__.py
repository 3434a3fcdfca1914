"""What users ask: options declared once for the command line and the Python API."""
