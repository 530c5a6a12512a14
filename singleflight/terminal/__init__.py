"""What a command has to do with a terminal: output, progress, Ctrl-C."""
