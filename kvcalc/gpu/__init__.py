"""What a GPU makes of operators: its datasheet, and the least time that it allows."""
