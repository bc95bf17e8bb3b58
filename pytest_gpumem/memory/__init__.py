"""Policy over memory, written once for both devices."""
