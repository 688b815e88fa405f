"""A package, so that a plugin's own `tests` folder on the path does not stand in its place."""
