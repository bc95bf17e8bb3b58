"""Plain data that every floor shares: frozen, without behaviour beyond arithmetic on their own fields."""
