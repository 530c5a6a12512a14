"""The real parts on this machine: a mooncake_master, a store node, a tiny model, engines."""
