"""Plain data that all rooms share: frozen msgspec Structs with arithmetic on their own fields, and
their JSON."""
