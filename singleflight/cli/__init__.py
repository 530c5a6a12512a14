"""The command `singleflight`, one module a command. Each imports what it uses when it runs."""
