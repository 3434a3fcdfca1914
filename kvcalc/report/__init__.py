"""Output for people: tables, files and plots."""
