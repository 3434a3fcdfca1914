"""GPUs: their datasheets, and roofline bounds of operators."""
