"""The command line: parse the words, call the API and print the answer."""
