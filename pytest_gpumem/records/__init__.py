"""Plain data that all rooms share: frozen msgspec Structs with arithmetic on their fields, and
their JSON."""
