"""Public data sets by name: fetched from where their owners keep them, checked, and packed with their known splits."""
